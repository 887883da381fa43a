"""Batches of ragged rows, as a loss gets them (padded, masked, in columns) and as the reference does (row by row)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.reference import Row, unit


class Passthrough(nn.Module):
    """A model whose features already hold the embeddings, and the mask of scored tokens beside the attention mask."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": features["vectors"], "attention_mask": features["scored"]}


@dataclass
class Batch:
    features: list[dict[str, Tensor]]
    rows: list[Row]
    labels: Tensor | None
    leaves: list[Tensor]  # the padded vectors of each column, to read gradients from


def make_batch(
    query_lengths: Sequence[int],
    document_lengths: Sequence[Sequence[int]],
    *,
    query_words: Sequence[int] | None = None,
    document_words: Sequence[Sequence[int]] | None = None,
    labels: Sequence[int] | None = None,
    padding: int = 0,
    holes: bool = False,
    per_row: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    dim: int = 3,
) -> Batch:
    """Make a batch of B rows.

    Args:
        query_lengths: Scored tokens of each query.
        document_lengths: Scored tokens of each row's documents, the positive first.
        query_words: A number per query; equal numbers make equal token ids. ``None``: all differ.
        document_words: Likewise for documents.
        labels: A label per row.
        padding: Extra masked positions in every column, with garbage in them.
        holes: Put the masked positions between the tokens instead of behind them.
        per_row: How many documents each document column holds per row: [1, 2] is a positive and one column of two
            negatives per row. ``None``: one each.
        dtype: Of the vectors that the loss sees; the reference sees the same values in float64.
        dim: D.
    """
    b, per_row = len(query_lengths), per_row or [1] * len(document_lengths[0])
    words = iter(range(1000, 10_000))
    query_words = query_words or [next(words) for _ in range(b)]
    document_words = document_words or [[next(words) for _ in row] for row in document_lengths]

    def column(lengths: Sequence[int], numbers: Sequence[int]) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
        width = max(max(lengths), 1) + padding
        vectors = torch.full((len(lengths), width, dim), 7.0, dtype=dtype)  # garbage where nothing is written
        scored = torch.zeros(len(lengths), width, dtype=torch.bool)
        for i, length in enumerate(lengths):
            places = torch.randperm(width)[:length].sort().values if holes else torch.arange(length)
            scored[i, places] = True
            vectors[i, places] = unit(length, dim).to(dtype)
        leaf = vectors.requires_grad_()
        # Content: two attended ids per input, padded on a random side.
        ids = torch.zeros(len(lengths), 4, dtype=torch.long)
        attended = torch.zeros_like(ids)
        for i, number in enumerate(numbers):
            start = int(torch.randint(0, 3, ()))
            ids[i] = torch.randint(0, 5, (4,))
            ids[i, start : start + 2] = torch.tensor([number, number + 1])
            attended[i, start : start + 2] = 1
        features = {"vectors": leaf, "scored": scored, "input_ids": ids, "attention_mask": attended}
        return features, [leaf[i][scored[i]].double() for i in range(len(lengths))], leaf

    query_features, queries, query_leaf = column(query_lengths, query_words)
    features, leaves = [query_features], [query_leaf]
    documents: list[list[Tensor]] = [[] for _ in range(b)]
    first = 0
    for n in per_row:
        lengths = [length for row in document_lengths for length in row[first : first + n]]
        numbers = [number for row in document_words for number in row[first : first + n]]
        document_features, tokens, leaf = column(lengths, numbers)
        features.append(document_features)
        leaves.append(leaf)
        for i in range(b):
            documents[i] += tokens[i * n : (i + 1) * n]
        first += n
    rows = [
        Row(
            query=queries[i],
            documents=documents[i],
            query_ids=(query_words[i],),
            document_ids=[(number,) for number in document_words[i]],
            label=None if labels is None else labels[i],
        )
        for i in range(b)
    ]
    return Batch(features, rows, None if labels is None else torch.tensor(labels), leaves)
