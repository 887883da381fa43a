"""MaxSim of each query with its own documents.

Here the similarities (B, N, Q, T) are Q / D times the size of the documents (B, N, T, D). The hard maximum still takes
a few queries at a time and keeps only the winners; the smooth maximum is written out, and left to autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_colbert_losses.maxsim.layout import tile_shape
from st_colbert_losses.maxsim.similarity import best
from st_colbert_losses.maxsim.winners import limits, sums_at_winners, sums_of_winners
from st_colbert_losses.tokens import Tokens


def own_hard_scores(queries: Tokens, documents: Tokens, dtype: torch.dtype) -> Tensor:
    """(B, N) sums of maxima."""
    vectors = queries.vectors.to(dtype)
    if not queries.mask.all():
        vectors = vectors.masked_fill(~queries.mask[..., None], 0)
    if torch.is_grad_enabled() and (vectors.requires_grad or documents.vectors.requires_grad):
        return cast(Tensor, _OwnMaxSim.apply(vectors, documents.vectors, documents.mask))
    return _search(vectors, documents.vectors, documents.mask, None)


def _search(queries: Tensor, documents: Tensor, mask: Tensor, winners: Tensor | None) -> Tensor:
    """(B, N) scores; where ``winners`` (B, N, Q) is given, each maximum's place in its document is written to it."""
    b, q, _ = queries.shape
    n, t = len(documents) // b, mask.shape[1]
    scores = queries.new_empty(b, n)
    unscored = None if mask.all() else ~mask
    for some, own in _chunks(b, n, math.prod(tile_shape(queries.device)) // (n * t * q)):
        hidden = None if unscored is None else unscored[own]
        if winners is None:
            maxima = _similarities(queries[some], documents[own], hidden).amax(1)
        else:
            maxima, places = best(_similarities(queries[some], documents[own], hidden))
            winners[some] = places.view(-1, n, q)
        scores[some] = maxima.sum(1).view(-1, n)
    return scores if unscored is None else scores.masked_fill_(unscored.all(1).view(b, n), 0)


def _similarities(queries: Tensor, documents: Tensor, unscored: Tensor | None) -> Tensor:
    """(b * N, T, Q), -inf for unscored tokens."""
    (b, q, d), t = queries.shape, documents.shape[1]
    similar = (documents.reshape(b, -1, d).to(queries.dtype) @ queries.mT).view(-1, t, q)
    return similar if unscored is None else similar.masked_fill_(unscored[..., None], -torch.inf)


class _OwnMaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, mask: Tensor) -> Tensor:
        b, q, _ = queries.shape
        winners = torch.empty(b, len(documents) // b, q, dtype=torch.int32, device=queries.device)
        ctx.save_for_backward(queries, documents, mask, winners)
        return _search(queries, documents, mask, winners)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, documents, mask, winners = ctx.saved_tensors
        (b, n, q), t, device = winners.shape, mask.shape[1], queries.device
        of_queries = torch.empty_like(queries) if ctx.needs_input_grad[0] else None
        of_documents = torch.empty_like(documents) if ctx.needs_input_grad[1] else None
        empty = ~mask.any(1)
        any_empty = bool(empty.any())
        grad = grad.masked_fill(empty.view(b, n), 0)
        pairs, most = limits(device)
        for some, own in _chunks(b, n, min(pairs // (n * q), most // (n * t))):
            c = some.stop - some.start
            rows = winners[some] + torch.arange(0, c * n * t, t, dtype=torch.int32, device=device).view(c, n, 1)
            weights = grad[some, :, None].expand(c, n, q)
            if of_queries is not None:
                store = documents[own].to(queries.dtype)
                if any_empty:  # its weight is 0, but it may hold anything
                    store = store.masked_fill(empty[own, None, None], 0)
                sums = sums_of_winners(rows.mT.reshape(-1, n), store.flatten(0, 1), weights.mT.reshape(-1, n))
                of_queries[some] = sums.view(c, q, -1)
            if of_documents is not None:
                tokens = torch.arange(c * q, device=device).view(c, 1, q).expand(c, n, q)
                sums = sums_at_winners(rows, c * n * t, queries[some].flatten(0, 1), tokens, weights)
                of_documents[own] = sums.view(c * n, t, -1)
        return of_queries, of_documents, None


def _chunks(b: int, n: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Up to ``step`` queries, and their documents, at a time."""
    for begin in range(0, b, max(1, step)):
        end = min(b, begin + max(1, step))
        yield slice(begin, end), slice(begin * n, end * n)


def own_smooth_scores(queries: Tokens, documents: Tokens, dtype: torch.dtype, tau: float) -> Tensor:
    """(B, N) sums of ``tau * logsumexp(similarities / tau)``."""
    b, n = len(queries), len(documents) // len(queries)
    q, d = (t.vectors.masked_fill(~t.mask[..., None], 0).to(dtype) for t in (queries, documents))
    empty = ~documents.mask.any(1, keepdim=True)
    unscored = ~(documents.mask | empty)
    products = (d.view(b, -1, d.shape[-1]) @ q.mT).view(b * n, -1, q.shape[1])
    smooth = tau * torch.logsumexp(products.masked_fill(unscored[..., None], -torch.inf) / tau, 1)
    counted = queries.mask.repeat_interleave(n, 0) & ~empty
    return smooth.masked_fill(~counted, 0).sum(-1).view(b, n)
