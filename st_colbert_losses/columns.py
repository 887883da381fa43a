"""The columns of a batch, and which of their documents are negatives of which query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from st_colbert_losses.maxsim import PackedTokens
from st_colbert_losses.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Column:
    """N queries or documents, and what tells which documents are negatives of which query.

    Args:
        tokens: Their token embeddings.
        rows: (N,) the row of the batch that each belongs to; a row holds a query and its documents.
        labels: (N,) the label of that row, or ``None`` where the batch has no labels.
        keys: (N,) their content (see :mod:`st_colbert_losses.content`), or ``None`` where it is unknown.
    """

    tokens: Tokens
    rows: Tensor
    labels: Tensor | None = None
    keys: Tensor | None = None

    @property
    def present(self) -> Tensor:
        """(N,) bool: which have a scored token."""
        return self.tokens.mask.any(1)


@dataclass(frozen=True, eq=False)
class Queued:
    """K documents of earlier batches: candidates like those of a column, of no row (-1) and without padding."""

    tokens: PackedTokens
    rows: Tensor
    labels: Tensor | None = None
    keys: Tensor | None = None

    @property
    def present(self) -> Tensor:
        """(K,) bool: which have a scored token."""
        return (self.tokens.lengths > 0).to(self.rows.device)


def negatives(queries: Column, positives: Column, candidates: Column | Queued) -> Tensor:
    """Tell which candidates are negatives of which query.

    None are: empty documents; the row's positive; copies of the row's positive, or of the positive of a row with the
    same query; documents of other rows that bear the row's label. A row's other documents stay whatever its label.

    Args:
        queries: B queries.
        positives: The positives of the batch, in the order of the queries.
        candidates: C documents, the positives themselves, others of the batch, or those of the queue.

    Returns:
        (B, C) bool.
    """
    other_row = queries.rows[:, None] != candidates.rows
    allowed = candidates.present.expand_as(other_row)
    if candidates is positives:
        allowed = allowed & other_row
    if queries.labels is not None and candidates.labels is not None:
        allowed = allowed & ~(other_row & (queries.labels[:, None] == candidates.labels))
    if positives.keys is not None and candidates.keys is not None:
        copies = positives.keys[:, None] == candidates.keys
        if queries.keys is not None:  # copies of any positive of the same query
            same_query = queries.keys[:, None] == queries.keys
            copies = (same_query.float() @ copies.float()) > 0
        allowed = allowed & ~copies
    return allowed


def own_negatives(positives: Column, candidates: Column) -> Tensor:
    """Tell which of a row's own documents are negatives of it: neither empty nor a copy of its positive.

    Args:
        positives: B positives.
        candidates: B * N documents, row by row.

    Returns:
        (B, N) bool.
    """
    allowed = candidates.present.view(len(positives.rows), -1)
    if positives.keys is not None and candidates.keys is not None:
        allowed &= positives.keys[:, None] != candidates.keys.view_as(allowed)
    return allowed
