"""Runs that name nothing from the Hub ask it nothing, so that they need not wait for it either.

Imported before the libraries, which read the environment once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import yaml

BUILT_IN = {"minilm", "tiny-colpali", "tiny-colqwen2", "tiny-colmodernvbert", "stdlib", "stdlib-pages"}
NAMES = ("model", "dataset", "datasets", "teacher", "push_to_hub")


def named(argv: list[str]) -> set[str]:
    """Return the models and datasets that a command line and its YAML file name."""
    found, key = set(), ""
    for text in argv:
        if text.startswith("--"):
            key, _, text = text.removeprefix("--").partition("=")
        if key in NAMES and (text or key == "push_to_hub"):  # a flag that stands alone
            found.add(text or key)
        elif text.endswith((".yaml", ".yml")):
            with suppress(OSError, ValueError, yaml.YAMLError):  # what is wrong with it is said later
                given = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
                if isinstance(given, dict):
                    found |= {str(given[name]) for name in NAMES if name in given}
    return found


if named(sys.argv[1:]) <= BUILT_IN:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
