"""The objectives: pure functions from the scores of a batch to one loss per query.

Each returns (B,), in the dtype of the scores. Notation in the formulas: ``p`` the positive's score, ``s`` the scores
of the row's negatives in the pool, ``h`` of its explicit negatives, ``T`` the temperature. Minus infinity in ``s`` and
``h`` stands for "no negative" and is neutral.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from st_colbert_losses.scores import Scores


def infonce(scores: Scores, temperature: float) -> Tensor:
    """``logsumexp({p, s} / T) - p / T``: the cross-entropy of the positive among all candidates.

    References:
        van den Oord et al. (2018), https://arxiv.org/abs/1807.03748
    """
    gaps = (scores.pool - scores.positive[:, None]) / temperature
    return _softplus(torch.logsumexp(gaps.clamp(min=torch.finfo(gaps.dtype).min), 1))


def pairwise(scores: Scores, temperature: float) -> Tensor:
    """``softplus((max s - p) / T)``: the hardest negative alone; 0 where the row has none.

    References:
        Faysse et al. (2024), ColPali, https://arxiv.org/abs/2407.01449
    """
    return _softplus((scores.pool.max(1).values - scores.positive) / temperature)


def sigmoid(scores: Scores, temperature: float, bias: float) -> Tensor:
    """``(softplus(-(p - bias) / T) + sum softplus((s - bias) / T)) / (1 + number of s)``.

    References:
        Zhai et al. (2023), SigLIP, https://arxiv.org/abs/2303.15343
    """
    positive = _softplus((bias - scores.positive) / temperature)
    negatives = _softplus((scores.pool - bias) / temperature).sum(1)
    return (positive + negatives) / (1 + _count(scores.pool))


def explicit(scores: Scores, temperature: float) -> Tensor:
    """``mean softplus((h - p) / T)`` over the row's explicit negatives; 0 where it has none."""
    terms = _softplus((scores.hard - scores.positive[:, None]) / temperature)
    return terms.sum(1) / _count(scores.hard).clamp(min=1)


def explicit_and_infonce(scores: Scores, temperature: float, in_batch_term_weight: float) -> Tensor:
    """``(1 - w) * explicit + w * infonce``."""
    return _blend(explicit(scores, temperature), infonce(scores, temperature), in_batch_term_weight)


def explicit_and_pairwise(scores: Scores, temperature: float, in_batch_term_weight: float) -> Tensor:
    """``(1 - w) * explicit + w * pairwise``."""
    return _blend(explicit(scores, temperature), pairwise(scores, temperature), in_batch_term_weight)


def _blend(own: Tensor, in_batch: Tensor, weight: float) -> Tensor:
    return (1 - weight) * own + weight * in_batch


def _count(scores: Tensor) -> Tensor:
    """The number of negatives of each row."""
    return (scores > -torch.inf).sum(1)


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, exact at both ends: torch's softplus cuts it off at 20; 0 at minus infinity."""
    return -F.logsigmoid(-x)
