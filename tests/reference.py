"""The formulas of every loss in plain loops over rows, documents and tokens, for float64 and nothing else.

Written from the definitions, sharing no code with the package. Autograd through the scalars gives the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

EXPLICIT = {"ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"}


@dataclass
class Row:
    """One row of a batch: the scored tokens of its query, of its positive and of its negatives, and their ids."""

    query: Tensor  # (Q, D), scored tokens only
    documents: list[Tensor]  # each (T, D), scored tokens only; the positive first
    query_ids: tuple[int, ...] | None = None
    document_ids: list[tuple[int, ...] | None] = field(default_factory=list)
    label: int | None = None
    teacher: Sequence[float] | None = None  # of each document


def maxsim(query: Tensor, document: Tensor, tau: float | None = None) -> Tensor:
    total = query.new_zeros(())
    if len(document) == 0:
        return total
    for token in query:
        similarities = [sum(a * b for a, b in zip(token, other, strict=True)) for other in document]
        if tau is None:
            total = total + max(similarities)
        else:
            top = max(float(s.detach()) for s in similarities)
            total = total + tau * torch.log(sum(torch.exp((s - top) / tau) for s in similarities)) + top
    return total


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-abs(x))) + (x if float(x.detach()) > 0 else 0 * x)


@dataclass
class QueuedDocument:
    """A document of the queue: its scored tokens, their ids, the label of the row it came from."""

    tokens: Tensor
    ids: tuple[int, ...] | None = None
    label: int | None = None


def loss(
    name: str,
    rows: Sequence[Row],
    queue: Sequence[QueuedDocument] = (),
    *,
    temperature: float,
    normalize_scores: bool = True,
    use_smooth_max: bool = False,
    tau: float = 0.1,
    pos_aware_negative_filtering: bool = False,
    filter_threshold: float = 0.95,
    filter_factor: float = 0.5,
    mask_duplicate_documents: bool = True,
    filter_mode: str = "damp",
    filter_margin: float | None = None,
    filter_explicit: bool = False,
    matryoshka_dims: Sequence[int] | None = None,
    matryoshka_weights: Sequence[float] | None = None,
    document_to_query_weight: float = 0.0,
    **of_the_objective: float,
) -> Tensor:
    """The mean loss of a batch."""
    if matryoshka_dims is not None:
        common = {key: value for key, value in locals().items() if key not in ("name", "rows", "queue")}
        common |= {"matryoshka_dims": None, **common.pop("of_the_objective")}
        weights = matryoshka_weights or [1.0] * len(matryoshka_dims)
        total = torch.zeros((), dtype=torch.float64)
        for width, weight in zip(matryoshka_dims, weights, strict=True):
            narrow = [
                replace(r, query=cut(r.query, width), documents=[cut(d, width) for d in r.documents]) for r in rows
            ]
            narrow_queue = [replace(d, tokens=cut(d.tokens, width)) for d in queue]
            total = total + weight / sum(weights) * loss(name, narrow, narrow_queue, **common)
        return total

    def score(row: Row, document: Tensor) -> Tensor:
        total = maxsim(row.query, document, tau if use_smooth_max else None)
        return total / max(len(row.query), 1) if normalize_scores else total

    def is_copy(row: Row, ids: tuple[int, ...] | None) -> bool:
        if not mask_duplicate_documents or ids is None:
            return False
        same_query = [r for r in rows if r is row or (r.query_ids is not None and r.query_ids == row.query_ids)]
        return any(ids == r.document_ids[0] for r in same_query)

    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        positive = score(row, row.documents[0])
        pool = []
        for other in rows:
            for n, document in enumerate(other.documents):
                if n > 0 and name in EXPLICIT:
                    continue
                if len(document) == 0 or (other is row and n == 0):
                    continue
                if is_copy(row, other.document_ids[n]):
                    continue
                if other is not row and row.label is not None and other.label == row.label:
                    continue
                pool.append(score(row, document))
        for queued in queue:
            if len(queued.tokens) == 0 or is_copy(row, queued.ids):
                continue
            if row.label is not None and queued.label == row.label:
                continue
            pool.append(score(row, queued.tokens))
        hard = [
            score(row, document)
            for n, document in enumerate(row.documents)
            if n > 0
            and len(document) > 0
            and not (
                mask_duplicate_documents
                and row.document_ids[n] is not None
                and row.document_ids[n] == row.document_ids[0]
            )
        ]
        if pos_aware_negative_filtering:
            p_value = float(positive.detach())
            limit = p_value - (abs(p_value) * (1 - filter_threshold) if filter_margin is None else filter_margin)

            def filtered(negatives: list[Tensor], limit: float = limit) -> list[Tensor]:
                if filter_mode == "mask":
                    return [s for s in negatives if float(s.detach()) <= limit]
                return [s - abs(s) * (1 - filter_factor) if float(s.detach()) > limit else s for s in negatives]

            pool, hard = filtered(pool), filtered(hard) if filter_explicit else hard
        queries = None
        if document_to_query_weight > 0:
            queries = []
            for other in rows:
                if other is row or len(other.query) == 0 or len(row.documents[0]) == 0:
                    continue
                if is_copy(other, row.document_ids[0]) or (other.label is not None and other.label == row.label):
                    continue
                queries.append(score(other, row.documents[0]))
        if name == "ColbertDistillationLoss":
            own = [(score(row, d), t) for d, t in zip(row.documents[1:], row.teacher[1:], strict=True) if len(d)]
            own = [(positive, row.teacher[0]), *own]
            total = total + _distillation(own, pool, temperature, **of_the_objective)
            continue
        total = total + _row(
            name, positive, pool, hard, queries, temperature, document_to_query_weight, **of_the_objective
        )
    return total / len(rows)


def cut(tokens: Tensor, width: int) -> Tensor:
    """The first dimensions of every token, of unit length again; at full width as they are."""
    if width == tokens.shape[1]:
        return tokens
    return (
        torch.stack([t[:width] / torch.sqrt((t[:width] * t[:width]).sum()) for t in tokens])
        if len(tokens)
        else (tokens[:, :width])
    )


def _cross_entropy(p: Tensor, others: list[Tensor], t: float) -> Tensor:
    logits = [s / t for s in [p, *others]]
    top = max(float(x.detach()) for x in logits)
    # log1p of the other terms, as log(1 + tiny) loses them
    rest = sum((torch.exp(x - p / t) for x in logits[1:]), 0 * p)
    if float(rest.detach()) < 0.5:
        return torch.log1p(rest)
    return torch.log(sum(torch.exp(x - top) for x in logits)) + top - p / t


def _distillation(
    own: list[tuple[Tensor, float]],
    pool: list[Tensor],
    t: float,
    teacher_temperature: float = 1.0,
    normalize_teacher_scores: bool = True,
    contrastive_weight: float = 0.0,
) -> Tensor:
    teacher = [float(score) for _, score in own]
    if normalize_teacher_scores:
        low, high = min(teacher), max(teacher)
        teacher = [(x - low) / (high - low) if high > low else 0.0 for x in teacher]
    weights = [math.exp((x - max(teacher)) / teacher_temperature) for x in teacher]
    target = [w / sum(weights) for w in weights]
    total = 0 * own[0][0]
    for i, goal in enumerate(target):
        # -log softmax of the i-th is the cross-entropy with it as the positive
        others = [score for j, (score, _) in enumerate(own) if j != i]
        total = total + goal * ((math.log(goal) if goal > 0 else 0.0) + _cross_entropy(own[i][0], others, t))
    return (1 - contrastive_weight) * total + contrastive_weight * _cross_entropy(own[0][0], pool, t)


def _row(
    name: str,
    p: Tensor,
    pool: list[Tensor],
    hard: list[Tensor],
    queries: list[Tensor] | None,
    t: float,
    v: float,
    in_batch_term_weight: float = 0.5,
    bias: float = 0.0,
) -> Tensor:
    w = in_batch_term_weight

    def infonce() -> Tensor:
        if queries is None:
            return _cross_entropy(p, pool, t)
        return (1 - v) * _cross_entropy(p, pool, t) + v * _cross_entropy(p, queries, t)

    def pairwise() -> Tensor:
        return softplus((max(pool) - p) / t) if pool else 0 * p

    def explicit() -> Tensor:
        return sum(softplus((h - p) / t) for h in hard) / len(hard) if hard else 0 * p

    if name == "ColbertLoss":
        return infonce()
    if name == "ColbertPairwiseCELoss":
        return pairwise()
    if name == "ColbertSigmoidLoss":
        terms = [softplus((bias - p) / t), *(softplus((s - bias) / t) for s in pool)]
        return sum(terms) / len(terms)
    if name == "ColbertNegativeCELoss":
        return (1 - w) * explicit() + w * infonce()
    if name == "ColbertPairwiseNegativeCELoss":
        return (1 - w) * explicit() + w * pairwise()
    raise KeyError(name)


def unit(*shape: int) -> Tensor:
    """Random unit vectors in float64."""
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)
