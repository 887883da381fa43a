"""The scores of a batch as the objectives see them, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from st_colbert_losses.columns import Column, Queued, negatives, own_negatives
from st_colbert_losses.distributed import gather_rows
from st_colbert_losses.maxsim import maxsim, maxsim_own


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of B queries; minus infinity stands for "no negative of this row", which every objective ignores.

    Args:
        positive: (B,) the score of each query's positive.
        pool: (B, P) the candidates shared by all queries: documents of the batch, of other processes, of a queue.
        hard: (B, H) the row's own explicit negatives, where a loss scores them apart from the pool; H may be 0.
        queries: (B, B of all processes) what the row's positive scores for other rows' queries, where a loss asks it.
        teacher: (B, 1 + H) a teacher's scores of the row's positive and its own documents, where there is one.
    """

    positive: Tensor
    pool: Tensor
    hard: Tensor
    queries: Tensor | None = None
    teacher: Tensor | None = None


def score(
    queries: Column,
    positives: Column,
    pool: Sequence[Column],
    hard: Sequence[Column],
    queued: Queued | None = None,
    *,
    sizes: Sequence[int] | None,
    tau: float | None,
    normalize: bool,
    both_ways: bool,
) -> Scores:
    """Score queries against the pool and against their own explicit negatives.

    Args:
        queries: B queries, of this process.
        positives: The positives of all rows, in the order of the rows; where there is a pool, its first column.
        pool: Columns of candidates, of all rows.
        hard: Columns of explicit negatives, (B * n documents, row by row).
        queued: The queue's documents, where there is one and it holds any.
        sizes: The queries of each process, where processes share documents; else ``None``.
        tau: Width of the smooth maximum, ``None`` for the maximum.
        normalize: Divide each query's scores by its number of scored tokens.
        both_ways: Also tell what positives score for other rows' queries; takes a pool.

    Returns:
        Scores with the pool query-major: candidate ``j * N + n`` is the n-th document of row j; the queue's follow.
    """
    b, rows = len(queries.tokens), len(positives.tokens)
    length = queries.tokens.mask.sum(1, keepdim=True).clamp(min=1) if normalize else 1
    pool_scores, hard_scores, others = [], [], None
    for column in pool:
        scores = maxsim(queries.tokens, column.tokens, tau=tau) / length
        allowed = negatives(queries, positives, column)
        if column is positives:
            positive = scores.gather(1, queries.rows[:, None]).squeeze(1)
            if both_ways:
                asking = scores.masked_fill(~(allowed & queries.present[:, None]), -torch.inf)
                others = (asking if sizes is None else gather_rows(asking, sizes))[:, queries.rows].T
        pool_scores.append(scores.masked_fill(~allowed, -torch.inf).view(b, rows, -1))
    if not pool:
        positive = (maxsim_own(queries.tokens, positives.tokens, tau=tau) / length).squeeze(1)
    for column in hard:
        scores = maxsim_own(queries.tokens, column.tokens, tau=tau) / length
        hard_scores.append(scores.masked_fill(~own_negatives(queries, positives, column), -torch.inf))
    candidates = torch.cat(pool_scores, 2).flatten(1) if pool else positive.new_empty(b, 0)
    if queued is not None:
        scores = maxsim(queries.tokens, queued.tokens, tau=tau) / length
        scores = scores.masked_fill(~negatives(queries, positives, queued), -torch.inf)
        candidates = torch.cat([candidates, scores.to(candidates.dtype)], 1)
    return Scores(
        positive=positive,
        pool=candidates,
        hard=torch.cat(hard_scores, 1) if hard_scores else positive.new_empty(b, 0),
        queries=others,
    )
