"""The formulas of every loss in plain loops over rows, documents and tokens, for float64 and nothing else.

Written from the definitions, sharing no code with the package. Autograd through the scalars gives the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    in_batch_term_weight: float = 0.5,
    bias: float = 0.0,
) -> Tensor:
    """The mean loss of a batch."""

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
        if pos_aware_negative_filtering:
            p_value = float(positive.detach())
            limit = p_value - abs(p_value) * (1 - filter_threshold)
            pool = [s - abs(s) * (1 - filter_factor) if float(s.detach()) > limit else s for s in pool]
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
        total = total + _row(name, positive, pool, hard, temperature, in_batch_term_weight, bias)
    return total / len(rows)


def _row(name: str, p: Tensor, pool: list[Tensor], hard: list[Tensor], t: float, w: float, bias: float) -> Tensor:
    def infonce() -> Tensor:
        logits = [s / t for s in [p, *pool]]
        top = max(float(x.detach()) for x in logits)
        # log1p of the other terms, as log(1 + tiny) loses them
        others = sum((torch.exp(x - p / t) for x in logits[1:]), 0 * p)
        if float(others.detach()) < 0.5:
            return torch.log1p(others)
        return torch.log(sum(torch.exp(x - top) for x in logits)) + top - p / t

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
