"""Every document: what a link or picture points to exists, under the name of a heading where it names one."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import st_colbert_losses

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "training_recipes", "model_cards", "benchmarks", "st_colbert_losses", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def parts(text: str) -> list[Token]:
    """All parts of a document, those within paragraphs too; code is a part of its own, so no link in it is found."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # a model card's metadata
    blocks = MarkdownIt("commonmark").enable("table").parse(text)
    return [part for block in blocks for part in (block, *(block.children or []))]


def targets(text: str) -> list[str]:
    """Where the links and pictures of a document point, in Markdown or in HTML."""
    found = []
    for part in parts(text):
        if part.type in ("html_block", "html_inline"):
            found += re.findall(r"""\b(?:href|src)=["'](.*?)["']""", part.content)
        else:
            found += [str(part.attrs[name]) for name in ("href", "src") if name in part.attrs]
    return found


def slugs(text: str) -> set[str]:
    """The names that GitHub gives to headings; of equal ones, the second and later get a number."""
    found: list[str] = []
    tokens = parts(text)
    for heading, title in pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(part.content for part in title.children or [])
            slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


def broken(document: Path, text: str) -> list[str]:
    """The targets that are not there."""
    missing = []
    for target in targets(text):
        if re.match(r"[a-z]+:", target):  # the network, or a mail
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (document.parent / path).resolve() if path else document
        there = file.exists() and file.is_relative_to(ROOT)
        if there and anchor:
            there = file.suffix == ".md" and anchor in slugs(text if file == document else file.read_text("utf-8"))
        if not there:
            missing.append(target)
    return missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path):
    assert broken(document, document.read_text(encoding="utf-8")) == []


def test_what_is_broken_is_found():
    text = """# One `two`: three, a-b
## Again
## Again
[here](#one-two-three-a-b) [twice](#again-1) [page](docs/queue.md#how-it-works) [folder](docs/)
![](docs/images/queue.svg)
`[code](none.md)` [out](https://example.org/none#none)

    [code](none.md)

[case](#Again) [third](#again-2) [file](none.md) [heading](docs/queue.md#none) ![](none.png) [by name]
| a | [cell](none/) |
|---|---|
<img src="none.svg"> [outside](../..) [line](Makefile#L1)

[by name]: none.txt
"""
    expected = "#Again #again-2 none.md docs/queue.md#none none.png none.txt none/ none.svg ../.. Makefile#L1"
    assert broken(ROOT / "README.md", text) == expected.split()


def test_the_reference_is_complete():
    reference = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"autoclass:: (?:st_colbert_losses\.)?(\w+)\n", reference)
    assert sorted(name for name in documented if name in st_colbert_losses.__all__) == sorted(
        st_colbert_losses.__all__
    )


@pytest.mark.parametrize("name", st_colbert_losses.__all__)
def test_the_reference_tells_every_type(name: str):
    parameters = inspect.signature(getattr(st_colbert_losses, name)).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.annotation is parameter.empty] == []
