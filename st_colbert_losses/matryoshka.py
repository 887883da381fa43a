"""Embeddings that are good at several widths: token vectors cut to their first dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch.nn.functional as F

from st_colbert_losses.columns import Column, Queued
from st_colbert_losses.maxsim import PackedTokens
from st_colbert_losses.tokens import Tokens

_C = TypeVar("_C", Column, Queued)


def shares_of_widths(
    owner: str, dims: Sequence[int] | None, weights: Sequence[float] | None
) -> list[tuple[int | None, float]]:
    """The widths that are scored, the widest first, and what share each has in the loss; ``None`` for the full width.

    Raises:
        ValueError: If there is not one weight per width.
    """
    if weights is not None and len(weights) != len(dims or ()):
        raise ValueError(
            f"{owner}: got matryoshka_weights={weights!r} for matryoshka_dims={dims!r}, expected one weight per "
            "width. Leave the weights out to weigh all alike."
        )
    if dims is None:
        return [(None, 1.0)]
    weights = weights or [1.0] * len(dims)
    return sorted(((d, w / sum(weights)) for d, w in zip(dims, weights, strict=True)), reverse=True)


def cut(column: _C, width: int) -> _C:
    """The same documents or queries with the first dimensions of their token vectors, of unit length again.

    Vectors of this width stay as they are.

    Raises:
        ValueError: If they have fewer dimensions.
    """
    tokens = column.tokens
    vectors, dimensions = tokens.vectors, tokens.vectors.shape[-1]
    if width > dimensions:
        raise ValueError(
            f"Matryoshka: got a width of {width}, expected at most the {dimensions} dimensions of the embeddings. "
            "Lower matryoshka_dims."
        )
    if width == dimensions:
        return column
    shorter = F.normalize(vectors[..., :width], dim=-1)
    if isinstance(column, Column):
        return replace(column, tokens=Tokens(shorter, column.tokens.mask))
    return replace(column, tokens=PackedTokens(shorter, column.tokens.lengths, column.tokens.starts))
