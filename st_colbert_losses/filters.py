"""Positive-aware filtering: what to do with negatives that score so high that they may be unlabelled positives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from st_colbert_losses.scores import Scores


def filter_likely_positives(
    scores: Scores, *, threshold: float, margin: float | None, factor: float, mode: str, explicit: bool
) -> Scores:
    """Lower or leave out the negatives that score nearly as high as the positive, or higher.

    A negative s is suspect above ``p - |p| * (1 - threshold)``, which is ``threshold * p`` for scores from 0, or, with
    a margin, above ``p - margin``. Which ones are is decided without gradient. No score is raised, and those that are
    not suspect stay as they are.

    Args:
        scores: The scores of a batch.
        threshold: Share of the positive's score, in (0, 1].
        margin: Distance from the positive's score instead, from 0, in units of a score; ``None`` for the threshold.
        factor: In [0, 1]: a damped negative becomes ``s - |s| * (1 - factor)``, ``factor * s`` for scores from 0.
        mode: "damp", or "mask" to leave suspects out; a row that loses all its negatives counts as one without any.
        explicit: Filter the row's own explicit negatives too, where a loss scores them apart from the pool.

    References:
        Positive-aware mining: Moreira et al. (2024), NV-Retriever, https://arxiv.org/abs/2407.15831; applied to the
        scores of a batch in colpali-engine's losses.
    """
    positive = scores.positive.detach()[:, None]
    limit = positive - (positive.abs() * (1 - threshold) if margin is None else margin)

    def filtered(negatives: Tensor) -> Tensor:
        suspect = negatives.detach() > limit
        if mode == "mask":
            return negatives.masked_fill(suspect, -torch.inf)
        # Minus infinity is never suspect, but would turn into NaN on its way to being discarded.
        candidates = negatives.masked_fill(~suspect, 0)
        return torch.where(suspect, candidates - candidates.abs() * (1 - factor), negatives)

    return replace(scores, pool=filtered(scores.pool), hard=filtered(scores.hard) if explicit else scores.hard)
