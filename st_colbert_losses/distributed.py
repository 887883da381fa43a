"""The processes that train together: one batch of documents for all of them.

DistributedDataParallel averages gradients over processes. So each process scores its own queries against everybody's
documents, and the gather sums, in backward, what all of them ask of a document: their mean is the gradient of one
process with the whole batch, and no factor is needed where all have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from st_colbert_losses.columns import NONE, Column
from st_colbert_losses.tokens import Tokens


def world_size() -> int:
    """The number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def gather_columns(columns: Sequence[Column]) -> list[Column]:
    """Join document columns of all processes, in the order of the processes.

    Every process makes the same collectives in the same order, whatever its batch holds: for each column one for its
    shape, its vectors, its mask and all else, and in backward one for the vectors.

    Args:
        columns: This process's, with rows counted over all processes.

    Returns:
        The same number of columns, padded to the widest, with gradients to everybody's vectors.
    """
    gathered = []
    for column in columns:
        vectors, mask = column.tokens.vectors, column.tokens.mask
        shapes = gather_sizes([len(mask), mask.shape[1]], vectors.device)
        sizes, width = [size for size, _ in shapes], max(width for _, width in shapes)
        padding = width - mask.shape[1]
        vectors = gather_rows(F.pad(vectors, (0, 0, 0, padding)), sizes)
        mask = _gather(F.pad(mask, (0, padding)).byte(), sizes).bool()
        unknown = torch.full_like(column.rows, NONE)
        known = [unknown if what is None else what for what in (column.labels, column.keys, column.query_keys)]
        own_rows, labels, keys, query_keys = _gather(torch.stack([column.rows, *known], 1), sizes).unbind(1)
        gathered.append(Column(Tokens(vectors, mask), own_rows, labels, keys, query_keys))
    return gathered


def gather_rows(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Join the first axis over processes, with gradients to everybody's part.

    Args:
        tensor: This process's part; only its first axis may have another size elsewhere.
        sizes: The size of the first axis of each process.
    """
    return cast(Tensor, _Gather.apply(tensor, list(sizes)))


def average_gradients(values: Tensor) -> Tensor:
    """The same values, with the mean over processes as their gradient: for parameters outside of a wrapped model."""
    return values if world_size() == 1 else cast(Tensor, _AverageGradients.apply(values))


def gather_sizes(sizes: Sequence[int], device: torch.device) -> list[list[int]]:
    """Some numbers of every process, of which another process may have more or fewer."""

    def share(numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=device)
        everybody = [torch.empty_like(mine) for _ in range(world_size())]
        dist.all_gather(everybody, mine)
        return [theirs.tolist() for theirs in everybody]

    lengths = [length for (length,) in share([len(sizes)])]
    padded = share([*sizes, *[0] * (max(lengths) - len(sizes))])
    return [theirs[:length] for theirs, length in zip(padded, lengths, strict=True)]


def _gather(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Join the first axis over processes; its size may differ, all others are the same."""
    padded = F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, max(sizes) - len(tensor))).contiguous()
    everybody = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everybody, padded)
    return torch.cat([part[:size] for part, size in zip(everybody, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    """The join, with the sum over processes of what they ask of this one's part as its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _gather(tensor, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        begin = sum(ctx.sizes[: rank()])
        return gradient[begin : begin + ctx.sizes[rank()]], None


class _AverageGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient / world_size()
