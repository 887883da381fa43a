"""Hard MaxSim: forward in tiles that keeps only which token won, and a backward pass that visits only the winners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_colbert_losses.maxsim.layout import Documents, Queries, blocks, in_whole_blocks
from st_colbert_losses.maxsim.similarity import best, similarities
from st_colbert_losses.maxsim.winners import limits, sums_at_winners, sums_of_winners


def hard_scores(queries: Queries, store: Tensor, documents: Documents) -> Tensor:
    """(K, B) scores of the documents in a store (R, D)."""
    if torch.is_grad_enabled() and (queries.vectors.requires_grad or store.requires_grad):
        return cast(Tensor, _HardMaxSim.apply(queries.vectors, store, queries, documents))
    return _search(queries, store, documents, None)


def _search(queries: Queries, store: Tensor, documents: Documents, winners: Tensor | None) -> Tensor:
    """(K, B) scores; where ``winners`` (K, M) is given, each maximum's row in the store is written to it."""
    vectors, m = in_whole_blocks(queries.vectors), len(queries.vectors)
    scores = vectors.new_empty(len(documents.lengths), queries.shape[0])
    for tile in documents.tiles(vectors):
        tokens = tile.gather(store, vectors.dtype)
        maxima = vectors.new_empty(len(tile.documents), len(vectors))
        for block in blocks(vectors):
            if winners is None:
                maxima[:, block] = tile.split(similarities(tokens, vectors[block])).amax(1)
            else:
                maxima[:, block], places = best(tile.split(similarities(tokens, vectors[block])))
                winners[tile.documents, block] = tile.split(tile.rows).gather(1, places)[:, : m - block.start].int()
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
        each = torch.arange(len(vectors), device=vectors.device)
        for some, rows in _chunks(ctx.documents, len(vectors), vectors.device):
            winner = winners[some] - rows.start
            weight = grad[some].index_select(1, owners)
            if of_queries is not None:
                of_queries += sums_of_winners(winner.T, store[rows].to(vectors.dtype), weight.T)
            if of_store is not None:
                of_store[rows] = sums_at_winners(
                    winner, rows.stop - rows.start, vectors, each.expand_as(winner), weight
                )
        return of_queries, of_store, None, None


def _chunks(documents: Documents, tokens: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """A few documents at a time, and the rows of the store that hold them: few pairs, and few rows."""
    first, stop = documents.first.tolist(), documents.stop.tolist()
    pairs, most = limits(device)
    begin, count = 0, max(1, pairs // tokens)
    while begin < len(first):
        low, high, end = first[begin], stop[begin], begin + 1
        while end < min(len(first), begin + count):
            if max(high, stop[end]) - min(low, first[end]) > most:
                break
            low, high, end = min(low, first[end]), max(high, stop[end]), end + 1
        yield slice(begin, end), slice(low, high)
        begin = end
