"""One thread (tiny tensors are ten times slower on two busy cores), no network, every test from the same state."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_state() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else a test may meet the recompile limit of those before it
