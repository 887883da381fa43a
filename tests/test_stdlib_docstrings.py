"""Pairs of a docstring's first sentence and its object: the same every time, clean, and none on two sides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from training_recipes import stdlib_docstrings
from training_recipes.stdlib_docstrings import load_pairs

ROOT = Path(__file__).parents[1]


def test_pairs_are_the_same_every_time():
    once = load_pairs()
    load_pairs.cache_clear()
    assert load_pairs() == once


def test_pairs_do_not_depend_on_the_hash_seed():
    code = "import zlib, training_recipes.stdlib_docstrings as s; print(zlib.crc32(repr(s.load_pairs()).encode()))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"},
        check=True,
        capture_output=True,
    )
    assert int(other.stdout) == zlib.crc32(repr(load_pairs()).encode())


def test_counts_are_sane():
    splits = [pair.split for pair in load_pairs()]
    assert 1800 <= len(splits) <= 3000
    assert splits.count("train") > 0.5 * len(splits)
    assert 150 <= splits.count("dev") <= 600
    assert 300 <= splits.count("test") <= 900


def test_no_module_is_on_two_sides():
    sides: dict[str, set[str]] = {}
    for pair in load_pairs():
        sides.setdefault(pair.name.partition(".")[0], set()).add(pair.split)
        sides.setdefault(pair.family, set()).add(pair.split)
    assert {module: parts for module, parts in sides.items() if len(parts) > 1} == {}


def test_queries_do_not_name_their_object():
    for pair in load_pairs():
        name = re.escape(pair.name.rpartition(".")[2].strip("_"))
        assert not re.search(rf"(?<!\w)_*{name}_*(?!\w)", pair.query, re.IGNORECASE), pair


def test_texts_are_clean_and_long_enough():
    for pair in load_pairs():
        for text, least in (
            (pair.query, stdlib_docstrings.MIN_QUERY_WORDS),
            (pair.document, stdlib_docstrings.MIN_DOCUMENT_WORDS),
        ):
            assert text == " ".join(text.split())
            assert stdlib_docstrings.words(text) >= least


def test_no_near_duplicates_remain():
    pairs = load_pairs()
    assert stdlib_docstrings.near_duplicates([pair.query for pair in pairs]) == set()
    assert stdlib_docstrings.near_duplicates([pair.document for pair in pairs]) == set()


@pytest.mark.parametrize(
    ("docstring", "query", "rest"),
    [
        ("Do a thing.  Then\nanother.", "Do a thing.", "Then another."),
        ("f(x) -> int\n\nDo a thing.\n\nMore of it.", "Do a thing.", "More of it."),
        ("f(x)\nDo a thing, e.g. this.  More.", "Do a thing, e.g. this.", "More."),
        ("Do a thing\n\nMore of it.", "Do a thing", "More of it."),
        ("f(x) -> int", "", ""),
    ],
)
def test_first_sentence(docstring: str, query: str, rest: str):
    assert stdlib_docstrings.first_sentence(docstring) == (query, rest)


@pytest.mark.parametrize(
    ("query", "name", "left"),
    [
        ("Open a file.", "open", "a file."),
        ("The `json.loads()` of a reopened file, loads.", "loads", "The of a reopened file,."),
        ("Call __init__ of it.", "__init__", "Call of it."),
    ],
)
def test_own_name_is_cut_out(query: str, name: str, left: str):
    assert stdlib_docstrings.without_name(query, name) == left
