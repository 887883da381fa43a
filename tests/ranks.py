"""Several processes on this machine, of one gloo group over loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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


class Collective(NamedTuple):
    """A collective of this rank, called from Python: DDP's own are not."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the tensor that the rank contributes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Record what passes through ``torch.distributed``'s functions."""
    seen: list[Collective] = []
    originals = {name: getattr(torch.distributed, name) for name in ("all_gather", "all_reduce")}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[name == "all_gather"]
            seen.append(Collective(name, tensor.dtype, tuple(tensor.shape)))
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(torch.distributed, name, recording(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)
