"""The objectives: pure functions from the scores of a batch to one loss per query.

Each returns (B,), in the dtype of the scores. Notation in the formulas: ``p`` the positive's score, ``s`` the scores
of the row's negatives in the pool, ``h`` of its explicit negatives, ``T`` the temperature. Minus infinity in ``s`` and
``h`` stands for "no negative" and is neutral. A learned temperature or bias comes as a scalar tensor: see
:func:`divide`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from st_colbert_losses.scores import Scores


def infonce(scores: Scores, temperature: float | Tensor, document_to_query_weight: float = 0.0) -> Tensor:
    """``(1 - v) * d + v * q``, both the cross-entropy of the positive pair, ``logsumexp({p, s} / T) - p / T``.

    In d, s are the query's scores for its negatives; in q, those of the positive for the other queries of the batch.

    References:
        van den Oord et al. (2018), https://arxiv.org/abs/1807.03748; both ways: Radford et al. (2021), CLIP,
        https://arxiv.org/abs/2103.00020
    """
    to_documents = _cross_entropy(scores.positive, scores.pool, temperature)
    if scores.queries is None:
        return to_documents
    to_queries = _cross_entropy(scores.positive, scores.queries, temperature)
    return (1 - document_to_query_weight) * to_documents + document_to_query_weight * to_queries


def pairwise(scores: Scores, temperature: float | Tensor) -> Tensor:
    """``softplus((max s - p) / T)``: the hardest negative alone; 0 where the row has none.

    References:
        Faysse et al. (2024), ColPali, https://arxiv.org/abs/2407.01449
    """
    return _softplus(divide(scores.pool.max(1).values - scores.positive, temperature))


def sigmoid(scores: Scores, temperature: float | Tensor, bias: float | Tensor) -> Tensor:
    """``(softplus(-(p - bias) / T) + sum softplus((s - bias) / T)) / (1 + number of s)``.

    References:
        Zhai et al. (2023), SigLIP, https://arxiv.org/abs/2303.15343
    """
    positive = _softplus(divide(bias - scores.positive, temperature))
    negatives = _softplus(divide(scores.pool - bias, temperature)).sum(1)
    return (positive + negatives) / (1 + _count(scores.pool))


def explicit(scores: Scores, temperature: float | Tensor) -> Tensor:
    """``mean softplus((h - p) / T)`` over the row's explicit negatives; 0 where it has none."""
    terms = _softplus(divide(scores.hard - scores.positive[:, None], temperature))
    return terms.sum(1) / _count(scores.hard).clamp(min=1)


def explicit_and_infonce(
    scores: Scores, temperature: float | Tensor, in_batch_term_weight: float, document_to_query_weight: float = 0.0
) -> Tensor:
    """``(1 - w) * explicit + w * infonce``."""
    in_batch = infonce(scores, temperature, document_to_query_weight)
    return _blend(explicit(scores, temperature), in_batch, in_batch_term_weight)


def explicit_and_pairwise(scores: Scores, temperature: float | Tensor, in_batch_term_weight: float) -> Tensor:
    """``(1 - w) * explicit + w * pairwise``."""
    return _blend(explicit(scores, temperature), pairwise(scores, temperature), in_batch_term_weight)


def distillation(
    scores: Scores,
    temperature: float | Tensor,
    teacher_temperature: float,
    normalize_teacher_scores: bool,
    contrastive_weight: float,
) -> Tensor:
    """``(1 - c) * KL(softmax(t / T_t) || softmax({p, h} / T)) + c * infonce``, t the teacher's scores.

    Over the positive and the row's own documents; those without a token take no part. ``normalize_teacher_scores``
    moves t to [0, 1] first, the row's lowest to 0 and its highest to 1.

    References:
        Hinton et al. (2015), https://arxiv.org/abs/1503.02531; Santhanam et al. (2022), ColBERTv2,
        https://arxiv.org/abs/2112.01488
    """
    student = torch.cat([scores.positive[:, None], scores.hard], 1)
    if scores.teacher is None:
        raise ValueError(
            "distillation: got no teacher's scores, expected one per document of a row. Use ColbertDistillationLoss."
        )
    absent = student == -torch.inf
    teacher = scores.teacher.to(student)
    if normalize_teacher_scores:
        lowest = teacher.masked_fill(absent, torch.inf).amin(1, keepdim=True)
        highest = teacher.masked_fill(absent, -torch.inf).amax(1, keepdim=True)
        teacher = (teacher - lowest) / (highest - lowest).clamp(min=torch.finfo(teacher.dtype).tiny)
    target = F.log_softmax((teacher / teacher_temperature).masked_fill(absent, -torch.inf), 1)
    # The gap first: differences of large numbers are exact, those of their quotients by a small temperature are not.
    log_probabilities = F.log_softmax(divide(student - scores.positive[:, None], temperature), 1)
    terms = target.exp() * (target - log_probabilities).masked_fill(absent, 0)
    divergence = terms.sum(1)
    if contrastive_weight == 0:
        return divergence
    return _blend(divergence, _cross_entropy(scores.positive, scores.pool, temperature), contrastive_weight)


def divide(gaps: Tensor, temperature: float | Tensor) -> Tensor:
    """``gaps / temperature``; minus infinity stays, and asks nothing of a temperature that is learned."""
    if not isinstance(temperature, Tensor):
        return gaps / temperature
    absent = gaps == -torch.inf
    return (gaps.masked_fill(absent, 0) / temperature).masked_fill(absent, -torch.inf)


def _cross_entropy(positive: Tensor, others: Tensor, temperature: float | Tensor) -> Tensor:
    gaps = divide(others - positive[:, None], temperature)
    return _softplus(torch.logsumexp(gaps.clamp(min=torch.finfo(gaps.dtype).min), 1))


def _blend(own: Tensor, in_batch: Tensor, weight: float) -> Tensor:
    return (1 - weight) * own + weight * in_batch


def _count(scores: Tensor) -> Tensor:
    """The number of negatives of each row."""
    return (scores > -torch.inf).sum(1)


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, exact at both ends: torch's softplus cuts it off at 20; 0 at minus infinity."""
    return -F.logsigmoid(-x)
