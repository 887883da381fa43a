"""Several processes on this machine, of one gloo group over loopback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_ranks(check: Callable[..., None], world: int, folder: Path, *arguments: Any) -> None:
    """Call ``check(rank, *arguments)`` in every rank of a group; fail if it fails in any."""
    torch.multiprocessing.spawn(_rank, (check, world, str(folder), arguments), nprocs=world)


def _rank(rank: int, check: Callable[..., None], world: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    check(rank, *arguments)
    torch.distributed.barrier()
    # Not by way of the interpreter's end: a thread of gloo that still lets go of a Python communication hook would be
    # unwound while Python shuts down, and now and then abort the process that passed.
    os._exit(0)
