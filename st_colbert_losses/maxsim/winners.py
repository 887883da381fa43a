"""Gradients of a hard maximum: each pair of a query token and a document passes its weight to the one row that won.

A dense backward pass multiplies matrices as large as the similarities, nearly all zeros; these sums visit the pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def limits(device: torch.device) -> tuple[int, int]:
    """Pairs and rows of the store to take at a time: on a CPU some 12 MB of indices, and 4 MB at D = 128."""
    return (2**18, 2**13) if device.type == "cpu" else (2**22, 2**17)


def sums_of_winners(winners: Tensor, store: Tensor, weights: Tensor) -> Tensor:
    """(n, D): for each query token the sum of the rows that won, times their weights; both are (n, documents)."""
    return F.embedding_bag(winners.contiguous(), store, per_sample_weights=weights.contiguous(), mode="sum")


def sums_at_winners(winners: Tensor, rows: int, vectors: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """(rows, D): for each row the sum of the query tokens that it won, times their weights.

    Pairs are sorted by their winner, so that no two additions meet and their order is always the same.

    Args:
        winners: (...) the row that won each pair.
        rows: How many rows there are.
        vectors: (M, D) query tokens.
        tokens: (...) the query token of each pair.
        weights: (...) the weight of each pair.
    """
    order = winners.flatten().sort(stable=True).indices
    won = torch.bincount(winners.flatten(), minlength=rows)
    tokens, weights = (pairs.flatten().index_select(0, order) for pairs in (tokens, weights))
    return F.embedding_bag(tokens, vectors, won.cumsum(0) - won, per_sample_weights=weights, mode="sum")
