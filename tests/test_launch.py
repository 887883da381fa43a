"""``accelerate launch`` with the real trainers: two processes that gather make the steps of one with all rows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import CASES, gradients
from tests.models import assert_same_gradients, tiny_model
from tests.test_resume import SAVED, assert_equal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    """What two processes computed; they are launched once for all tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without --cpu, which means one process; the arguments of the trainer say that there is no GPU to use.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no".split()
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "-m", "tests.launched", str(folder)],
        cwd=Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("[rank"))
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(("name", "accumulate", "dtype"), CASES)
def test_steps_are_those_of_one_process(name, accumulate, dtype, ranks, tmp_path):
    """Micro-batches, a last batch that is short on one rank, copies and labels across ranks."""
    one = gradients(tiny_model(), name, accumulate, dtype, processes=1, folder=tmp_path)
    # float32: sums over other groups of rows and widths; the bound.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-10
    for rank in ranks:
        together = rank[name, accumulate, dtype]
        assert len(together["steps"]) == len(one["steps"]) == 2
        for mine, expected in zip(together["steps"], one["steps"], strict=True):
            assert_same_gradients(mine, expected, tolerance)
        if one["queue"] is not None:
            for what in ("lengths", "keys", "labels"):
                assert torch.equal(together["queue"][what], one["queue"][what])
            torch.testing.assert_close(together["queue"]["vectors"], one["queue"]["vectors"], rtol=0, atol=1e-5)
            assert len(one["queue"]["lengths"]) == 12


def test_cached_with_every_parameter_reporting(ranks, tmp_path):
    """``ddp_find_unused_parameters=False``, though world M's pooler takes no part."""
    name = "CachedColbertNegativeCELoss"
    one = gradients(tiny_model(), name, 1, torch.float64, processes=1, folder=tmp_path)
    for rank in ranks:
        for mine, expected in zip(rank[name, "every parameter reports"]["steps"], one["steps"], strict=True):
            assert_same_gradients(mine, expected, 1e-10)


@pytest.mark.parametrize("gather", [False, True])
def test_resume(gather, ranks, folder):
    """Bit for bit, dropout included: weights, momentum encoder, and the queue of each rank."""
    for rank in ranks:
        assert_equal(rank["resume", gather]["whole"], rank["resume", gather]["resumed"])
    (weights, memory), (other_weights, other_memory) = (rank["resume", gather]["whole"] for rank in ranks)
    assert_equal(weights, other_weights)
    memories = [m[""]["memory._extra_state"] for m in (memory, other_memory)]
    assert_equal(*(m["momentum_model"] for m in memories))
    queues = [m["queue"] for m in memories]
    assert all(len(queue["lengths"]) == 9 for queue in queues)
    if gather:
        assert_equal(*queues)
    else:  # each has the documents that it saw
        assert not torch.equal(queues[0]["keys"], queues[1]["keys"])
    files = {path.name for path in (folder / f"gather_{gather}" / "whole" / f"checkpoint-{SAVED}").glob("_st_*")}
    assert files == {"_st_colbert_losses_rank0.pt", "_st_colbert_losses_rank1.pt"}
