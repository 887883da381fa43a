"""A few of many explicit negatives, drawn anew at each step and before anything is encoded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from st_colbert_losses.distributed import rank
from st_colbert_losses.features import count_rows, join_rows, row_bounds, select_rows


def draw_negatives(features: list[dict[str, Any]], k: int) -> tuple[list[dict[str, Any]], Tensor | None]:
    """Draw k of each row's negatives, without putting any back.

    Drawn from torch's random generator, which trainers save and restore, and apart on each process.

    Args:
        features: The query, the positive, and columns of negatives with one or more per row.
        k: Negatives of a row that stay.

    Returns:
        The query, the positive, and one column of k negatives per row; and (B, k), which they are, counted over the
        columns. All columns and ``None`` where no row has more than k.
    """
    b = count_rows(features[0])
    columns = features[2:]
    counts = [count_rows(column) for column in columns]
    places, first = [], 0
    for count in counts:
        places.append(first + torch.arange(count).view(b, -1))
        first += count
    place = torch.cat(places, 1) if places else torch.empty(b, 0)
    if place.shape[1] <= k:
        return features, None
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())) + rank())
    drawn = torch.rand(place.shape, generator=generator).argsort(1)[:, :k].sort(1).values
    rows = place.gather(1, drawn).flatten().tolist()
    joined = join_rows(columns)
    return [*features[:2], select_rows(joined, row_bounds(joined, first), rows)], drawn
