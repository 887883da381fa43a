"""The processes that train together."""

from __future__ import annotations

import torch.distributed as dist


def world_size() -> int:
    """The number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0
