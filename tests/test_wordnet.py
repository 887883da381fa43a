"""The second task of benchmarks/quality: what is read from WordNet's files, and which queries count as hard."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality.wordnet import read_pairs

LICENCE = "  1 This software and database is being provided to you\n"
BREATHE = (
    "00001740 29 v 02 breathe 0 take_a_breath 0 001 * 00005041 v 0000 01 + 02 00 | draw air into, and expel out of, "
    'the lungs; "I can breathe better when the air is clean"; "The patient is respiring"  \n'
)
RESPIRE = "00002325 29 v 01 respire 1 000 01 + 02 00 | undergo the processes of respiration  \n"  # no example
SHORT = '00002573 29 v 01 choke 0 000 01 + 02 00 | breathe with great difficulty; "She choked"  \n'
OUTER = '00003131 00 a 01 outer(a) 0 000 | being on the outside (as of a thing); "the outer planets are cold"  \n'


def write_wordnet(folder: Path) -> None:
    for part, lines in {"noun": "", "verb": BREATHE + RESPIRE + SHORT, "adj": OUTER, "adv": ""}.items():
        (folder / f"data.{part}").write_text(LICENCE + lines, encoding="utf-8")


def test_examples_and_glosses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wordnet(tmp_path)
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    assert sorted(read_pairs()) == [
        (
            "I can breathe better when the air is clean",
            "breathe, take a breath: draw air into, and expel out of, the lungs",
        ),
        ("the outer planets are cold", "outer: being on the outside (as of a thing)"),
    ]


def test_without_wordnet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="wordnet-base"):
        read_pairs()
