"""The README's scripts run as they stand, pasted into a fresh interpreter in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import PYLATE

README = Path(__file__).parent.parent / "README.md"
OTHER_WORLD = "MultiVectorEncoder" if PYLATE else "pylate"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_each_world_has_a_script():
    assert sum("from pylate" in block for block in BLOCKS) == 1
    assert sum("MultiVectorEncoderTrainer" in block for block in BLOCKS) == 1


@pytest.mark.parametrize("block", [block for block in BLOCKS if OTHER_WORLD not in block])
def test_script(block, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    if "save_pretrained" in block:
        card = (tmp_path / "output" / "birds" / "final" / "README.md").read_text(encoding="utf-8")
        assert "ColbertLoss" in card
