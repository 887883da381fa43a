"""The scores of a batch as the objectives see them, how they are made, and the filter on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from st_colbert_losses.columns import Column, Queued, negatives, own_negatives
from st_colbert_losses.maxsim import maxsim, maxsim_own


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of B queries; minus infinity stands for "no negative of this row", which every objective ignores.

    Args:
        positive: (B,) the score of each query's positive.
        pool: (B, P) the candidates shared by all queries: documents of the batch, of other processes, of a queue.
        hard: (B, H) the row's own explicit negatives, where a loss scores them apart from the pool; H may be 0.
    """

    positive: Tensor
    pool: Tensor
    hard: Tensor


def score(
    queries: Column,
    pool: Sequence[Column],
    hard: Sequence[Column],
    queued: Queued | None = None,
    *,
    tau: float | None,
    normalize: bool,
) -> Scores:
    """Score queries against the pool and against their own explicit negatives.

    Args:
        queries: B queries, of this process.
        pool: Columns of candidates, of all rows; the first holds the positives, in the order of the rows.
        hard: Columns of explicit negatives, (B * n documents, row by row).
        queued: The queue's documents, where there is one and it holds any.
        tau: Width of the smooth maximum, ``None`` for the maximum.
        normalize: Divide each query's scores by its number of scored tokens.

    Returns:
        Scores with the pool query-major: candidate ``j * N + n`` is the n-th document of row j; the queue's follow.
    """
    positives = pool[0]
    b, rows = len(queries.tokens), len(positives.tokens)
    length = queries.tokens.mask.sum(1, keepdim=True).clamp(min=1) if normalize else 1
    pool_scores, hard_scores = [], []
    for column in pool:
        scores = maxsim(queries.tokens, column.tokens, tau=tau) / length
        if column is positives:
            positive = scores.gather(1, queries.rows[:, None]).squeeze(1)
        scores = scores.masked_fill(~negatives(queries, positives, column), -torch.inf)
        pool_scores.append(scores.view(b, rows, -1))
    for column in hard:
        scores = maxsim_own(queries.tokens, column.tokens, tau=tau) / length
        hard_scores.append(scores.masked_fill(~own_negatives(queries, positives, column), -torch.inf))
    candidates = torch.cat(pool_scores, 2).flatten(1)
    if queued is not None:
        scores = maxsim(queries.tokens, queued.tokens, tau=tau) / length
        scores = scores.masked_fill(~negatives(queries, positives, queued), -torch.inf)
        candidates = torch.cat([candidates, scores.to(candidates.dtype)], 1)
    return Scores(
        positive=positive,
        pool=candidates,
        hard=torch.cat(hard_scores, 1) if hard_scores else positive.new_empty(b, 0),
    )


def lower_likely_positives(scores: Scores, threshold: float, factor: float) -> Scores:
    """Lower the pool's negatives that score nearly as high as the positive, as they may be unlabelled positives.

    A negative s above ``p - |p| * (1 - threshold)`` becomes ``s - |s| * (1 - factor)``; with scores from 0 this is
    ``factor * s`` above ``threshold * p``. No score is raised. Which ones are lowered is decided without gradient.

    References:
        Positive-aware mining: Moreira et al. (2024), NV-Retriever, https://arxiv.org/abs/2407.15831; applied to the
        scores of a batch in colpali-engine's losses.
    """
    positive = scores.positive.detach()[:, None]
    suspect = scores.pool.detach() > positive - positive.abs() * (1 - threshold)
    # Minus infinity is never suspect, but would turn into NaN on its way to being discarded.
    candidates = scores.pool.masked_fill(~suspect, 0)
    lowered = candidates - candidates.abs() * (1 - factor)
    return replace(scores, pool=torch.where(suspect, lowered, scores.pool))
