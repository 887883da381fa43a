"""The rows of a feature dict: which part of it is whose, some of them, those of several dicts together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Images, films and sound, which placeholders stand for among the token ids.
VALUES = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
# Models for images of any size flatten the patches: a grid tells each image's, a count each row's images.
_GRIDS = {
    "pixel_values": ("image_grid_thw", "num_images_per_sample"),
    "pixel_values_videos": ("video_grid_thw", "num_videos_per_sample"),
}
# Without a grid, these hold one entry per image, unless one of the next holds one entry per row.
_PER_IMAGE = ("pixel_values", "image_sizes", "image_position_ids")
_PER_ROW = ("pixel_attention_mask", "aspect_ratio_ids")


def own_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """What a column holds itself, without what numbered columns beside it do.

    Trainers go by prefixes: they give a column ``negative`` the ids of ``negative_1`` too, as ``1_input_ids``.
    """
    return {key: value for key, value in features.items() if not re.match(r"\d+_", key)}


def count_rows(features: Mapping[str, Any]) -> int:
    """The number of rows of a feature dict.

    Raises:
        ValueError: If no tensor tells.
    """
    preferred = [features.get(key) for key in ("input_ids", "attention_mask")]
    tensors = (value for value in [*preferred, *own_features(features).values()] if isinstance(value, Tensor))
    tensor = next((tensor for tensor in tensors if tensor.ndim > 0), None)
    if tensor is None:
        raise ValueError(
            f"Features: got {sorted(features)}, expected a tensor with one entry per row. Tokenise the column, or use "
            "a loss without mini-batches and without negatives_per_step."
        )
    return len(tensor)


def row_bounds(features: Mapping[str, Any], rows: int) -> dict[str, Sequence[int]]:
    """Where each row's part of each tensor begins and ends.

    Returns:
        For each tensor that is split by rows, rows + 1 indices into its first axis: row i owns
        ``tensor[bounds[i] : bounds[i + 1]]``.

    Raises:
        ValueError: If a tensor's first axis cannot be told apart by rows.
    """
    bounds: dict[str, Sequence[int]] = {}
    for values_key, (grid_key, count_key) in _GRIDS.items():
        values, grid = features.get(values_key), features.get(grid_key)
        if isinstance(values, Tensor) and isinstance(grid, Tensor):
            counts = _counts(features.get(count_key), len(grid), rows)
            if counts is None:
                continue
            bounds[grid_key] = _cumulate(counts)
            patches = _cumulate(grid.prod(-1).tolist())
            if len(values) == patches[-1] and values.ndim == 2:
                bounds[values_key] = [patches[i] for i in bounds[grid_key]]
    counts = _counts(features.get("num_images_per_sample"), None, rows)
    if counts is not None and "image_grid_thw" not in bounds and not any(key in features for key in _PER_ROW):
        bounds |= {key: _cumulate(counts) for key in _PER_IMAGE if _length(features.get(key)) == sum(counts)}
    for key, value in own_features(features).items():
        if key in bounds or not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if len(value) != rows:
            raise ValueError(
                f"Features: got {key!r} of shape {tuple(value.shape)} for {rows} rows, expected one entry per row or "
                "a grid that tells each row's part. Use a loss without mini-batches and without negatives_per_step "
                "for this model."
            )
        bounds[key] = range(rows + 1)
    return bounds


def select_rows(
    features: Mapping[str, Any],
    bounds: Mapping[str, Sequence[int]],
    chosen: Sequence[int],
    width: int | None = None,
) -> dict[str, Any]:
    """Some rows of every tensor; what is no tensor is passed on.

    Args:
        features: The features of a column.
        bounds: What :func:`row_bounds` says of them.
        chosen: The rows, in the order that is wanted.
        width: Positions of a text that are kept; ``None`` for all.
    """
    mask = features.get("attention_mask")
    shape = mask.shape if isinstance(mask, Tensor) and mask.ndim == 2 else None
    selected = {}
    for key, value in own_features(features).items():
        if key not in bounds:
            selected[key] = value
            continue
        starts = bounds[key]
        index = [i for row in chosen for i in range(starts[row], starts[row + 1])]
        if not index:  # rows without images
            continue
        part = value[torch.tensor(index, device=value.device)]
        selected[key] = part[:, :width] if value.shape == shape else part
    return selected


def join_rows(columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of several columns, one column after the other, padded behind to the widest.

    Raises:
        ValueError: If a column holds something that another does not, or a tensor of other sizes, or differs in what
            is no tensor of rows.
    """
    columns = [own_features(column) for column in columns]
    joined = {}
    texts = [column["attention_mask"].shape for column in columns if "attention_mask" in column]
    remedy = "Give all of them inputs of one kind, or set negatives_per_step=None."
    for key in dict.fromkeys(chain.from_iterable(columns)):
        values = [column[key] for column in columns if key in column]
        if len(values) < len(columns):
            raise ValueError(
                f"Features: got {key!r} in {len(values)} of {len(columns)} columns of negatives, expected it in all "
                f"or in none, as some rows of each are encoded together. {remedy}"
            )
        parts = [value for value in values if isinstance(value, Tensor) and value.ndim > 0]
        if len(parts) < len(columns):
            if other := [value for value in values if value != values[0]]:
                raise ValueError(
                    f"Features: got {key!r} of {values[0]!r} and {other[0]!r} in columns of negatives, expected the "
                    f"same in all, as some rows of each are encoded together. {remedy}"
                )
            joined[key] = values[0]
            continue
        if [part.shape for part in parts] == texts and parts[0].ndim == 2:
            width = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, width - part.shape[1])) for part in parts]
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError(
                f"Features: got {key!r} of shapes {[tuple(part.shape) for part in parts]} in columns of negatives, "
                "expected the same sizes behind the rows. Give them as one column of lists, or set "
                "negatives_per_step=None."
            )
        joined[key] = torch.cat(parts)
    return joined


def _length(value: object) -> int:
    return len(value) if isinstance(value, Tensor) and value.ndim > 0 else -1


def _counts(counts: object, images: int | None, rows: int) -> list[int] | None:
    """Images of each row: as told, or one each where there are as many images as rows."""
    if isinstance(counts, Tensor) and len(counts) == rows and images in (None, int(counts.sum())):
        return [int(n) for n in counts.tolist()]
    return [1] * rows if images == rows else None


def _cumulate(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))
