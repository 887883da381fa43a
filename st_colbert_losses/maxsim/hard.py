"""Hard MaxSim: forward in tiles that keeps only which token won, and a backward pass that visits only the winners."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from st_colbert_losses.maxsim.layout import Documents, Queries, blocks, in_whole_blocks
from st_colbert_losses.maxsim.similarity import best, similarities

_PAIRS = 2**18
_CAST_ROWS = 2**13


def hard_scores(queries: Queries, store: Tensor, documents: Documents) -> Tensor:
    """(K, B) scores of the documents in a store (R, D)."""
    if torch.is_grad_enabled() and (queries.vectors.requires_grad or store.requires_grad):
        return _HardMaxSim.apply(queries.vectors, store, queries, documents)  # type: ignore[no-any-return]
    return _search(queries, store, documents, None)


def _search(queries: Queries, store: Tensor, documents: Documents, winners: Tensor | None) -> Tensor:
    """(K, B) scores; where ``winners`` (K, M) is given, each maximum's row in the store is written to it."""
    vectors, m = in_whole_blocks(queries.vectors), len(queries.vectors)
    scores = vectors.new_empty(len(documents.lengths), queries.shape[0])
    for tile in documents.tiles(vectors):
        tokens = tile.gather(store, vectors.dtype)
        maxima = vectors.new_empty(len(tokens), len(vectors))
        for block in blocks(vectors):
            similar = similarities(tokens, vectors[block])
            if winners is None:
                maxima[:, block] = similar.amax(1)
            else:
                maxima[:, block], places = best(similar)
                winners[tile.documents, block] = tile.rows.gather(1, places)[:, : m - block.start].int()
        scores[tile.documents] = queries.sum(maxima[:, :m])
    return scores


class _HardMaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, store: Tensor, queries: Queries, documents: Documents) -> Tensor:
        winners = torch.empty(len(documents.lengths), len(vectors), dtype=torch.int32, device=vectors.device)
        scores = _search(queries, store, documents, winners)
        ctx.save_for_backward(vectors, store, winners, queries.owners())
        ctx.documents = documents
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        vectors, store, winners, owners = ctx.saved_tensors
        of_queries = torch.zeros_like(vectors) if ctx.needs_input_grad[0] else None
        of_store = torch.zeros_like(store) if ctx.needs_input_grad[1] else None
        if not winners.numel():
            return of_queries, of_store, None, None
        for some, rows in _chunks(ctx.documents, len(vectors), cast=store.dtype != vectors.dtype):
            winner = winners[some] - rows.start
            weight = grad[some].index_select(1, owners)
            if of_queries is not None:
                of_queries += _sums_of_winners(winner, store[rows].to(vectors.dtype), weight)
            if of_store is not None:
                of_store[rows] = _sums_at_winners(winner, rows.stop - rows.start, vectors, weight)
        return of_queries, of_store, None, None


def _chunks(documents: Documents, tokens: int, *, cast: bool) -> Iterator[tuple[slice, slice]]:
    """A few documents at a time, and the rows of the store that hold them.

    Few, so that the pairs of a document and a query token stay below 2**18 (some 12 MB of indices), and the rows below
    2**13 where they have to be cast (4 MB at D = 128).
    """
    first, stop = documents.first.tolist(), documents.stop.tolist()
    most_documents, most_rows = max(1, _PAIRS // max(1, tokens)), _CAST_ROWS if cast else math.inf
    begin = 0
    while begin < len(first):
        low, high, end = first[begin], stop[begin], begin + 1
        while end < min(len(first), begin + most_documents):
            if max(high, stop[end]) - min(low, first[end]) > most_rows:
                break
            low, high, end = min(low, first[end]), max(high, stop[end]), end + 1
        yield slice(begin, end), slice(low, high)
        begin = end


def _sums_of_winners(rows: Tensor, store: Tensor, weights: Tensor) -> Tensor:
    """(M, D): for each query token the sum over documents of the row that won times its weight, both (c, M)."""
    return F.embedding_bag(rows.T.contiguous(), store, per_sample_weights=weights.T.contiguous(), mode="sum")


def _sums_at_winners(rows: Tensor, count: int, vectors: Tensor, weights: Tensor) -> Tensor:
    """(count, D): for each row of the store the sum over the query tokens it won of their vector and weight."""
    order = rows.flatten().sort(stable=True).indices
    won = torch.bincount(rows.flatten(), minlength=count)
    bags = won.cumsum(0) - won
    weights = weights.flatten().index_select(0, order)
    return F.embedding_bag(order % len(vectors), vectors, bags, per_sample_weights=weights, mode="sum")
