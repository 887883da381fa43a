"""A retrieval task that every Python carries: find a function of the standard library by what it does.

The query is the first sentence of a docstring, the document is the rest of it. The docstrings are read from the source
files with `ast`, so nothing is imported and nothing is downloaded:

    python -m training_recipes.stdlib_docstrings            # counts per split and a few pairs

Cleaning, in this order:

1. Functions, methods and classes only; test suites, IDLE, lib2to3, demos and bundled wheels are left out, and so are
   files that are not UTF-8.
2. Leading lines that are a call signature (`split(s, sep=None) -> list`) are no sentence: they are dropped. So are
   pairs whose query would be code or grammar (`>>>`, `->`, ` = `).
3. The query is the first sentence of the first paragraph; whitespace is normalised on both sides, and a document that
   repeats the sentence loses the copy.
4. The object's own name is cut out of the query (whole words, any case, with a dotted prefix, quotes and call
   parentheses around it), because the rest of a docstring often repeats it: what remains says what the object does,
   not what it is called.
5. Pairs with fewer than `MIN_QUERY_WORDS` or `MIN_DOCUMENT_WORDS` words left are dropped.
6. Near-duplicates are dropped: of two pairs whose queries or documents share `NEAR_DUPLICATE` of their distinct words
   (Jaccard) the first by name stays. Overridden methods and the C/Python twins of a module go this way.

The split is by module family (`family`), decided by a hash of its name: a package with all its submodules, a class
with all its methods, a module and its private twin are on one side. Other Python versions have other docstrings, hence
slightly other pairs; one version gives the same pairs in the same order every time.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sklearn.feature_extraction.text import CountVectorizer

MIN_QUERY_WORDS = 4
MIN_DOCUMENT_WORDS = 10
NEAR_DUPLICATE = 0.8
DEV_SHARE, TEST_SHARE = 0.15, 0.2  # of the module families; the rest trains

SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "pydoc_data", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__", "_bundled", "_vendor"),
}
# Modules that document the same things under names that do not show it: one family each.
RELATIVES = {
    **dict.fromkeys(("concurrent", "multiprocessing", "threading", "threading_local", "queue"), "asyncio"),
    **dict.fromkeys(("posixpath", "ntpath", "genericpath", "nturl2path"), "os"),
    **dict.fromkeys(("pyio", "compression", "bz2", "lzma", "gzip"), "io"),
    **dict.fromkeys(("collections_abc", "abc", "py_abc"), "collections"),
    **dict.fromkeys(("sre_compile", "sre_constants", "sre_parse"), "re"),
    **dict.fromkeys(("pydecimal", "fractions", "numbers"), "decimal"),
    **dict.fromkeys(("pydatetime", "strptime", "calendar"), "datetime"),
    **dict.fromkeys(("ssl", "selectors", "socketserver"), "socket"),
    "turtle": "tkinter",
    "weakrefset": "weakref",
}

SIGNATURE = re.compile(r"[\w.]+ ?\(.*\)\W*|[\w.]+ ?\(.*\) (?:->|=>|=|--) .*|[^A-Z]* [-=]> .*")
NO_SENTENCE = re.compile(r">>>|->|=>| = ")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|incl|[A-Z])|\.\.)\.$")
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'`]*\s+(?=[^\sa-z])|\s+(?=>>> )")
WORD = re.compile(r"[^\W_]+")


class Pair(NamedTuple):
    """One query with its document.

    Attributes:
        name: Qualified name of the documented object, e.g. `json.decoder.JSONDecoder.decode`.
        family: The group of modules that is split as one, e.g. `json`.
        split: `train`, `dev` or `test`.
        query: First sentence of the docstring, without the object's name.
        document: The rest of the docstring.
    """

    name: str
    family: str
    split: str
    query: str
    document: str


@cache
def load_pairs() -> tuple[Pair, ...]:
    """Read, clean and split the docstrings of the running Python's standard library.

    Returns:
        All pairs of all splits, ordered by name; about 2,400 of them on CPython 3.11.
    """
    library = Path(sysconfig.get_path("stdlib"))
    pairs = []
    for file in source_files(library):
        parts = file.relative_to(library).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, docstring in docstrings(file, module):
            sentence, document = first_sentence(docstring)
            query = without_name(sentence, name.rpartition(".")[2])
            document = " ".join(document.replace(sentence, " ").split())
            long_enough = words(query) >= MIN_QUERY_WORDS and words(document) >= MIN_DOCUMENT_WORDS
            if long_enough and not NO_SENTENCE.search(query):
                pairs.append(Pair(name, family(module), split_of(family(module)), query, document))
    pairs.sort()
    twins = near_duplicates([pair.query for pair in pairs]) | near_duplicates([pair.document for pair in pairs])
    return tuple(pair for row, pair in enumerate(pairs) if row not in twins)


def source_files(library: Path) -> Iterator[Path]:
    """Yield the library's own source files."""
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def docstrings(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified name and the docstring of each function, method and class that a source file defines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in string literals are not our business
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, SyntaxError):
        return

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}"
                docstring = ast.get_docstring(child)
                if docstring:
                    yield name, docstring
                yield from visit(child, name)
            elif not isinstance(child, ast.expr):
                yield from visit(child, prefix)

    yield from visit(tree, module)


def first_sentence(docstring: str) -> tuple[str, str]:
    """Split a docstring into its first sentence and the rest, both on one line; leading signatures are dropped."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", docstring.strip())]
    while paragraphs and SIGNATURE.fullmatch(" ".join(paragraphs[0].split())):
        paragraphs.pop(0)
    lines = paragraphs[0].splitlines() if paragraphs else []
    while lines and SIGNATURE.fullmatch(lines[0].strip()):
        lines.pop(0)
    paragraph, rest = " ".join(" ".join(lines).split()), " ".join(" ".join(paragraphs[1:]).split())
    for end in SENTENCE_END.finditer(paragraph):
        sentence = paragraph[: end.end()].strip()
        if not ABBREVIATION.search(sentence):
            return sentence, f"{paragraph[end.end() :]} {rest}".strip()
    return paragraph, rest


def without_name(query: str, name: str) -> str:
    """Cut every mention of an object's own name out of its query."""
    bare = name.strip("_") or name
    if bare.lower() in query.lower():
        mention = rf"[\"'`]*(?<!\w)(?:\w+\.)*_*{bare}_*(?!\w)(?:\(\))?[\"'`]*"
        query = " ".join(re.sub(mention, " ", query, flags=re.IGNORECASE).split())
    return re.sub(r"\s+([.,;:!?])(?=\s|$)", r"\1", query).lstrip(" .,;:+*-").strip()


def words(text: str) -> int:
    """Count the words that hold a letter."""
    return sum(not word.isdigit() for word in WORD.findall(text))


def near_duplicates(texts: list[str]) -> set[int]:
    """Return the rows whose set of words nearly equals that of an earlier row."""
    counts = CountVectorizer(binary=True, token_pattern=r"[^\W_]+").fit_transform(texts)
    sizes = counts.sum(axis=1).A1
    shared = (counts @ counts.T).tocoo()
    later = shared.row > shared.col
    row, column, common = shared.row[later], shared.col[later], shared.data[later]
    return set(row[common >= NEAR_DUPLICATE * (sizes[row] + sizes[column] - common)].tolist())


def family(module: str) -> str:
    """Return the name under which a module is split: its package, without the underscore of private twins."""
    top = module.partition(".")[0].strip("_")
    return RELATIVES.get(top, top)


def split_of(family: str) -> str:
    """Return the split of a module family, from a hash of its name."""
    share = zlib.crc32(family.encode()) / 2**32
    return "test" if share < TEST_SHARE else "dev" if share < TEST_SHARE + DEV_SHARE else "train"


if __name__ == "__main__":
    for wanted in ("train", "dev", "test"):
        chosen = [pair for pair in load_pairs() if pair.split == wanted]
        print(f"{wanted}: {len(chosen)} pairs from {len({pair.family for pair in chosen})} module families, such as")
        for pair in chosen[:: len(chosen) // 3]:
            print(f"  {pair.name}\n    query:    {pair.query[:100]}\n    document: {pair.document[:100]}")
