"""MaxSim, the late-interaction score of token embeddings. The only module that knows token similarities."""

from __future__ import annotations

import torch
from torch import Tensor

from st_colbert_losses.tokens import Tokens


def maxsim(queries: Tokens, documents: Tokens, *, tau: float | None = None) -> Tensor:
    """Score every query against every document.

    ``S[b, c] = sum over scored query tokens i of max over scored document tokens j of q[b, i] . d[c, j]``

    Args:
        queries: B queries, (B, Q, D).
        documents: C documents, (C, T, D).
        tau: ``None`` for the maximum; a positive number replaces it by ``tau * logsumexp(similarities / tau)``.

    Returns:
        (B, C), float64 for float64 embeddings and float32 otherwise. A query or a document without a scored token
        scores 0 with zero gradient.

    References:
        Khattab and Zaharia (2020), ColBERT, https://arxiv.org/abs/2004.12832

    Example:
        >>> import torch
        >>> from st_colbert_losses import Tokens
        >>> from st_colbert_losses.maxsim import maxsim
        >>> query = Tokens(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
        >>> document = Tokens(torch.tensor([[[0.6, 0.8], [1.0, 0.0]]]))
        >>> round(maxsim(query, document).item(), 4)
        1.8
    """
    q, d = _prepare(queries, documents)
    return _sum_of_best(torch.einsum("bqd,ctd->bcqt", q, d), queries.mask[:, None], documents.mask[None], tau)


def maxsim_own(queries: Tokens, documents: Tokens, *, tau: float | None = None) -> Tensor:
    """Score every query against its own documents.

    Args:
        queries: B queries, (B, Q, D).
        documents: B * N documents, (B * N, T, D), row by row: document ``b * N + n`` is the n-th of query b.
        tau: As in :func:`maxsim`.

    Returns:
        (B, N), dtype and empty rows as in :func:`maxsim`.
    """
    q, d = _prepare(queries, documents)
    b = len(queries)
    similarity = torch.einsum("bqd,bntd->bnqt", q, d.unflatten(0, (b, -1)))
    return _sum_of_best(similarity, queries.mask[:, None], documents.mask.unflatten(0, (b, -1)), tau)


def _prepare(queries: Tokens, documents: Tokens) -> tuple[Tensor, Tensor]:
    """Vectors in the dtype of the sums, with zeros where a token is masked."""
    dtype = torch.promote_types(torch.promote_types(queries.vectors.dtype, documents.vectors.dtype), torch.float32)
    q, d = (t.vectors.to(dtype).masked_fill(~t.mask[..., None], 0) for t in (queries, documents))
    return q, d


def _sum_of_best(similarity: Tensor, query_mask: Tensor, document_mask: Tensor, tau: float | None) -> Tensor:
    """(B, C, Q, T) similarities to (B, C) scores."""
    similarity = similarity.masked_fill(~document_mask[:, :, None, :], -torch.inf)
    best = similarity.amax(-1) if tau is None else tau * torch.logsumexp(similarity / tau, -1)
    best = best.masked_fill(~document_mask.any(-1)[:, :, None], 0)
    return best.masked_fill(~query_mask, 0).sum(-1)
