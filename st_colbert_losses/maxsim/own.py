"""MaxSim of each query with its own documents.

Here the similarities (B, N, Q, T) are Q / D times the size of the documents (B, N, T, D), so there is little to spare:
the search for the hard maximum runs a few queries at a time, the smooth maximum all at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from st_colbert_losses.maxsim.layout import tile_shape
from st_colbert_losses.maxsim.similarity import best
from st_colbert_losses.tokens import Tokens


def own_hard_scores(queries: Tokens, documents: Tokens, dtype: torch.dtype) -> Tensor:
    """(B, N) sums of dot products with the tokens that won."""
    b, q, d = queries.vectors.shape
    vectors = queries.vectors.masked_fill(~queries.mask[..., None], 0).to(dtype)
    winners = _winners(vectors.detach(), documents)
    won = documents.vectors.flatten(0, 1).to(dtype).index_select(0, winners.flatten()).view(b, -1, q, d)
    empty = ~documents.mask.any(1).view(b, -1, 1, 1)
    return (won.masked_fill(empty, 0) * vectors[:, None]).sum(-1).sum(-1)


@torch.no_grad()
def _winners(queries: Tensor, documents: Tokens) -> Tensor:
    """(B * N, Q) the best token for each query token, the first of equals, as a row of the flattened documents."""
    b, q, d = queries.shape
    n, t = len(documents) // b, documents.mask.shape[1]
    places = []
    step = max(1, math.prod(tile_shape(queries.device)) // (n * t * q))
    for begin in range(0, b, step):
        some = slice(begin * n, (begin + step) * n)
        tokens = documents.vectors[some].to(queries.dtype).view(-1, n * t, d)
        products = (tokens @ queries[begin : begin + step].mT).view(-1, t, q)
        places.append(best(products.masked_fill_(~documents.mask[some, :, None], -torch.inf))[1])
    return torch.cat(places) + torch.arange(b * n, device=queries.device)[:, None] * t


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
