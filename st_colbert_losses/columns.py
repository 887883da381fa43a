"""A batch in columns, and which of their documents are negatives of which query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from st_colbert_losses.maxsim import PackedTokens
from st_colbert_losses.tokens import Tokens

# Stands for "no label" and "content unknown" where others have them; equal to nothing that an input has.
NONE = -(1 << 63)


@dataclass(frozen=True, eq=False)
class Column:
    """N queries or documents, and what tells which documents are negatives of which query.

    Args:
        tokens: Their token embeddings.
        rows: (N,) the row of the batch, counted over all processes, that each belongs to; a row holds a query, a
            positive and any negatives.
        labels: (N,) the label of that row, or ``None`` where the batch has no labels.
        keys: (N,) their content (see :mod:`st_colbert_losses.content`), or ``None`` where it is unknown.
        query_keys: (N,) the content of that row's query, or ``None``.
    """

    tokens: Tokens
    rows: Tensor
    labels: Tensor | None = None
    keys: Tensor | None = None
    query_keys: Tensor | None = None

    @property
    def present(self) -> Tensor:
        """(N,) bool: which have a scored token."""
        return self.tokens.mask.any(1)


@dataclass(frozen=True, eq=False)
class Batch:
    """The columns of a process's batch.

    Args:
        queries: Its queries.
        documents: Its document columns, the positives first.
        sizes: The rows of the batch of each process, where processes share documents; else ``None``.
        teacher: (B, documents per row) a teacher's scores, the positive's first, where there is one.
    """

    queries: Column
    documents: list[Column]
    sizes: Sequence[int] | None
    teacher: Tensor | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[Tokens],
        keys: Sequence[Tensor | None],
        labels: Tensor | None,
        sizes: Sequence[int] | None,
        rank: int,
        teacher: Tensor | None = None,
    ) -> Batch:
        """Number the rows of a batch and mark its documents with what is known of their rows."""
        b, device = len(tokens[0]), tokens[0].vectors.device
        first = 0 if sizes is None else sum(sizes[:rank])
        columns = []
        for column, column_keys in zip(tokens, keys, strict=True):
            row = torch.arange(b, device=device).repeat_interleave(len(column) // b)
            its_labels = None if labels is None else labels.to(device)[row]
            query_keys = None if keys[0] is None else keys[0][row]
            columns.append(Column(column, first + row, its_labels, column_keys, query_keys))
        return cls(columns[0], columns[1:], sizes, None if teacher is None else teacher.to(device))

    @property
    def weight(self) -> float:
        """What the mean over this batch's rows counts for in a mean over processes that is one over all rows."""
        if self.sizes is None:
            return 1.0
        return len(self.queries.rows) * len(self.sizes) / sum(self.sizes)


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
        positives: The positives of all rows, in the order of the rows.
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
        copies = (positives.keys[:, None] == candidates.keys) & (positives.keys[:, None] != NONE)
        same_query = queries.rows[:, None] == positives.rows
        if queries.keys is not None and positives.query_keys is not None:
            same_query = same_query | (queries.keys[:, None] == positives.query_keys)
        allowed = allowed & ((same_query.float() @ copies.float()) == 0)
    return allowed


def own_negatives(queries: Column, positives: Column, candidates: Column) -> Tensor:
    """Tell which of a row's own documents are negatives of it: neither empty nor a copy of its positive.

    Args:
        queries: B queries.
        positives: The positives of all rows, in the order of the rows.
        candidates: B * N documents, row by row.

    Returns:
        (B, N) bool.
    """
    allowed = candidates.present.view(len(queries.rows), -1)
    if positives.keys is not None and candidates.keys is not None:
        copies = positives.keys[queries.rows, None] == candidates.keys.view_as(allowed)
        allowed = allowed & ~(copies & (candidates.keys.view_as(allowed) != NONE))
    return allowed
