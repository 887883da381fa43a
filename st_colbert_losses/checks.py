"""What a loss refuses: too few columns, rows that do not fit, labels of another kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_columns(owner: str, columns: int, explicit_negatives: bool) -> None:
    """Refuse a batch without positives, or without the explicit negatives that the loss is about.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    names = ["a query", "a positive", "at least one negative"][: 3 if explicit_negatives else 2]
    if columns >= len(names):
        return
    remedy = "Add the missing column to the dataset"
    if columns == 2:
        remedy += ", or use a loss without explicit negatives: ColbertLoss or ColbertPairwiseCELoss"
    raise ValueError(f"{owner}: got {columns} column(s), expected {' + '.join(names)}. {remedy}.")


def check_rows(owner: str, rows: Sequence[int]) -> None:
    """Refuse columns whose numbers of rows do not fit: B queries, B positives, n * B negatives per column.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    b, *documents = rows
    if b == 0:
        raise ValueError(f"{owner}: got 0 queries, expected at least 1. Leave empty batches out.")
    for i, found in enumerate(documents, start=1):
        if found == b or (i > 1 and found and found % b == 0):
            continue
        expected = f"{b}, one positive per query" if i == 1 else f"{b}, or n * {b} for n negatives per row"
        remedy = (
            "Put one positive in column 1 and negatives in further columns"
            if i == 1
            else "Give every row the same number of negatives, row by row"
        )
        raise ValueError(f"{owner}: got {found} rows in column {i} for {b} queries, expected {expected}. {remedy}.")


def check_labels(owner: str, labels: Tensor | None, rows: int) -> None:
    """Refuse labels that are not one integer per row.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if labels is None:
        return
    if isinstance(labels, Tensor):
        integer = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if integer and labels.shape == (rows,):
            return
        got = f"{str(labels.dtype).removeprefix('torch.')} labels of shape {tuple(labels.shape)}"
    else:
        got = f"labels of type {type(labels).__name__}"
    raise ValueError(
        f"{owner}: got {got}, expected a tensor of {rows} integers, one per row. Labels mark rows that are no "
        "negatives of each other; remove a 'label' or 'score' column that means anything else."
    )
