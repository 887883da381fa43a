"""Smooth MaxSim: ``tau * logsumexp(similarities / tau)`` for each maximum; backward computes its tiles again."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from st_colbert_losses.maxsim.layout import Documents, Queries, Tile, blocks, in_whole_blocks
from st_colbert_losses.maxsim.similarity import similarities


def smooth_scores(queries: Queries, store: Tensor, documents: Documents, tau: float) -> Tensor:
    """(K, B) scores of the documents in a store (R, D)."""
    return cast(Tensor, _SmoothMaxSim.apply(queries.vectors, store, queries, documents, tau))


class _SmoothMaxSim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, store: Tensor, queries: Queries, documents: Documents, tau: float
    ) -> Tensor:
        scaled = in_whole_blocks(vectors / tau)
        smooth = vectors.new_empty(len(documents.lengths), len(scaled))
        scores = vectors.new_empty(len(documents.lengths), queries.shape[0])
        for tile in documents.tiles(scaled):
            tokens = tile.gather(store, scaled.dtype)
            for block in blocks(scaled):
                smooth[tile.documents, block] = _logsumexp(_similarities(tile, tokens, scaled[block])[1])
            scores[tile.documents] = queries.sum(smooth[tile.documents, : len(vectors)]).mul_(tau)
        ctx.save_for_backward(vectors, store, smooth, queries.owners())
        ctx.documents, ctx.tau = documents, tau
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        vectors, store, smooth, owners = ctx.saved_tensors
        padded, scaled = in_whole_blocks(vectors), in_whole_blocks(vectors / ctx.tau)
        owners = F.pad(owners, (0, len(padded) - len(owners)))
        of_queries = torch.zeros_like(padded) if ctx.needs_input_grad[0] else None
        of_store = torch.zeros_like(store) if ctx.needs_input_grad[1] else None
        with torch.autocast(vectors.device.type, enabled=False):
            for tile in ctx.documents.tiles(scaled):
                tokens = tile.gather(store, padded.dtype)
                of_tokens = torch.zeros_like(tokens)
                for block in blocks(scaled):
                    flat, share = _similarities(tile, tokens, scaled[block])
                    share.sub_(smooth[tile.documents, None, block]).exp_()
                    share.mul_(grad[tile.documents].index_select(1, owners[block])[:, None])
                    if of_queries is not None:
                        of_queries[block].addmm_(flat.T, tokens)
                    if of_store is not None:
                        of_tokens += similarities(flat, padded[block].T.contiguous())
                    del flat, share  # the next tile takes their place
                if of_store is not None:
                    of_store.index_add_(0, tile.rows, of_tokens.to(store.dtype))
        return None if of_queries is None else of_queries[: len(vectors)], of_store, None, None, None


def _similarities(tile: Tile, tokens: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """(R, n), 0 beyond the documents, and the view (t, L, n) of it, -inf where a document's token is repeated."""
    flat = similarities(tokens, vectors)
    similar = tile.split(flat)
    flat[similar.shape[0] * similar.shape[1] :].zero_()
    return flat, similar if tile.repeats is None else similar.masked_fill_(tile.repeats[..., None], -torch.inf)


def _logsumexp(similar: Tensor) -> Tensor:
    """Over the document's tokens, in place: (t, L, n) to (t, n)."""
    highest = similar.amax(1)
    return similar.sub_(highest[:, None]).exp_().sum(1).log_().add_(highest)
