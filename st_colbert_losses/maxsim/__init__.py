"""MaxSim, the late-interaction score of token embeddings. The only package that knows token similarities.

Nothing here ever holds all similarities of a batch. Documents are scored in tiles that stay in the cache; kept for the
backward pass is one number for each pair of a query token and a document: which token won, or the logsumexp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from st_colbert_losses.eager import eager
from st_colbert_losses.maxsim.hard import hard_scores
from st_colbert_losses.maxsim.kernels import kernel_scores, use_kernels
from st_colbert_losses.maxsim.layout import Documents, Queries
from st_colbert_losses.maxsim.own import own_hard_scores, own_smooth_scores
from st_colbert_losses.maxsim.packed import PackedTokens
from st_colbert_losses.maxsim.smooth import smooth_scores
from st_colbert_losses.tokens import Tokens

__all__ = ["PackedTokens", "maxsim", "maxsim_own", "use_kernels"]


@eager  # there is nothing to fuse, and tiles change with every batch
def maxsim(queries: Tokens, documents: Tokens | PackedTokens, *, tau: float | None = None) -> Tensor:
    """Score every query against every document.

    ``S[b, c] = sum over scored query tokens i of max over scored document tokens j of q[b, i] . d[c, j]``

    Products and sums are in float32 at least, autocast or not; gradients come back in the dtype of the embeddings.
    Where several tokens of a document are equally similar, the first has the whole gradient. On a CPU the same input
    gives the same result bit for bit. Asking for a gradient of the gradient raises.

    Args:
        queries: B queries, (B, Q, D).
        documents: C documents, (C, T, D), or C packed ones, which receive no gradient.
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
    with torch.autocast(queries.vectors.device.type, enabled=False):
        if tau is None and isinstance(documents, Tokens):
            scores = kernel_scores(queries, documents, own=False)
            if scores is not None:
                return scores
        laid_out, kept = Documents.of(documents)
        tokens = Queries.of(queries, _dtype(queries, documents))
        store = documents.vectors.flatten(0, 1) if isinstance(documents, Tokens) else documents.vectors.detach()
        store = store.contiguous()
        scores = hard_scores(tokens, store, laid_out) if tau is None else smooth_scores(tokens, store, laid_out, tau)
        if len(kept) < len(documents):
            scores = scores.new_zeros(len(documents), len(queries)).index_copy(0, kept.to(scores.device), scores)
        return scores.T.contiguous()


@eager  # there is nothing to fuse, and tiles change with every batch
def maxsim_own(queries: Tokens, documents: Tokens, *, tau: float | None = None) -> Tensor:
    """Score every query against its own documents.

    Args:
        queries: B queries, (B, Q, D).
        documents: B * N documents, (B * N, T, D), row by row: document ``b * N + n`` is the n-th of query b.
        tau: As in :func:`maxsim`.

    Returns:
        (B, N), dtype, empty rows and equally similar tokens as in :func:`maxsim`.
    """
    dtype = _dtype(queries, documents)
    with torch.autocast(queries.vectors.device.type, enabled=False):
        if not queries.mask.numel() or not documents.mask.numel():
            nothing = queries.vectors[:0].sum(dtype=dtype) + documents.vectors[:0].sum(dtype=dtype)
            return nothing.expand(len(queries), len(documents) // max(1, len(queries)))
        if tau is None:
            scores = kernel_scores(queries, documents, own=True)
            if scores is not None:
                return scores
            return own_hard_scores(queries, documents, dtype)
        return own_smooth_scores(queries, documents, dtype, tau)


def _dtype(queries: Tokens, documents: Tokens | PackedTokens) -> torch.dtype:
    """The dtype of products and sums."""
    return torch.promote_types(torch.promote_types(queries.vectors.dtype, documents.vectors.dtype), torch.float32)
