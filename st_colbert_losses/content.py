"""When two inputs are the same input: 64-bit keys of attended token ids, of pixels and of sound.

Embeddings cannot tell (dropout makes copies differ), these can, however they were padded. Equal inputs have equal
keys; different ones share a key with probability 2**-64 a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from st_colbert_losses.features import VALUES, row_bounds

# Odd 64-bit constants of the splitmix64 generator (Steele et al. 2014), as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_GRIDS = ("image_grid_thw", "video_grid_thw")
_LAYOUT = ("num_images_per_sample", "num_videos_per_sample", "pixel_attention_mask", "aspect_ratio_ids")
_CONTENT = ("input_ids", "attention_mask", *VALUES, *_GRIDS, *_LAYOUT)


def content_keys(features: Mapping[str, Any], rows: int) -> Tensor | None:
    """Key the content of each row of a feature dict.

    Args:
        features: What the model is called with: ``input_ids`` (rows, T) with ``attention_mask``, ``pixel_values`` (one
            entry per row, or flattened patches with ``image_grid_thw``), sound in ``input_values`` or
            ``input_features``, or several of them.
        rows: Number of rows.

    Returns:
        (rows,) int64, or ``None`` where the features hold none of them that can be told apart by row.

    Example:
        >>> import torch
        >>> from st_colbert_losses.content import content_keys
        >>> ids, attended = torch.tensor([[5, 6, 0], [5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
        >>> first, second = content_keys({"input_ids": ids, "attention_mask": attended}, 2)
        >>> bool(first == second)
        True
    """
    try:
        bounds = row_bounds({key: features[key] for key in _CONTENT if key in features}, rows)
    except ValueError:
        return None
    keys: list[Tensor] = []
    ids, attended = features.get("input_ids"), features.get("attention_mask")
    if isinstance(ids, Tensor):
        attended = attended.bool() if isinstance(attended, Tensor) else torch.ones_like(ids, dtype=torch.bool)
        if ids.ndim != 2 or attended.shape != ids.shape:
            return None
        keys.append(_hash(ids.long(), attended.long().cumsum(1), attended))
    for name in (*VALUES, *_GRIDS):
        if name in bounds:
            starts = bounds[name]
            keys.append(torch.stack([_hash_values(features[name][a:b]) for a, b in pairwise(starts)]))
    if not keys:
        return None
    combined = keys[0]
    for other in keys[1:]:
        combined = _mix(combined * _GOLDEN + other)
    return combined


def _hash_values(values: Tensor) -> Tensor:
    bits = (values.detach().float().flatten() + 0.0).view(torch.int32).long()  # + 0.0: one zero, not two
    return _hash(bits, torch.arange(1, len(bits) + 1, device=bits.device), bits != 0)


def _hash(numbers: Tensor, positions: Tensor, counted: Tensor) -> Tensor:
    """Sum over the last axis of a random function of number and position: order matters, padding does not."""
    return (_mix(numbers * _GOLDEN + _mix(positions)) * counted).sum(-1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch shifts in copies of the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
