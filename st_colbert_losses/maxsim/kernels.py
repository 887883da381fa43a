"""The CUDA kernels of late-interaction-kernels, which multiply half-precision embeddings on the tensor cores.

They take over where that package is installed and they compute what our tiles compute: the hard maximum of bfloat16 or
float16 embeddings, with any masks. float32 they would round to float16, so it stays with the tiles, and packed
documents do. (flash-maxsim rounds bfloat16 to float16 too, and knows no masks with holes.)
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from st_colbert_losses.tokens import Tokens

_wanted = True


def use_kernels(wanted: bool) -> None:
    """Turn the CUDA kernels of other packages off, or on again, for the whole process; at first they are on.

    Args:
        wanted: Whether to use them where they apply.

    Example:
        >>> from st_colbert_losses.maxsim import use_kernels
        >>> use_kernels(False)
        >>> use_kernels(True)
    """
    global _wanted
    _wanted = wanted


def kernel_scores(queries: Tokens, documents: Tokens, *, own: bool) -> Tensor | None:
    """Scores (B, C), or (B, N) of the queries' ``own`` documents; ``None`` where the kernels do not apply."""
    if not (_wanted and _applicable(queries.vectors, documents.vectors) and _installed()):
        return None
    from late_interaction_kernels import maxsim

    b = len(queries)
    q, d = (t.vectors.masked_fill(~t.mask[..., None], 0) for t in (queries, documents))
    scored = documents.mask.any(1)
    if own:
        d, mask, scored = d.view(b, -1, *d.shape[1:]), documents.mask.view(b, -1, d.shape[1]), scored.view(b, -1)
    else:
        mask = documents.mask
    # "unified" sums in float32 but in any order, "lowmem" in the embeddings' dtype and always in the same.
    backward = "lowmem" if torch.are_deterministic_algorithms_enabled() else "unified"
    scores: Tensor = maxsim(q, d, queries.mask, mask, backward=backward)
    return scores.masked_fill(~scored, 0)


def _applicable(q: Tensor, d: Tensor) -> bool:
    half = q.dtype == d.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return half and bool(q.numel() and d.numel()) and q.shape[-1] >= 16 and _on_tensor_cores(q) and _on_tensor_cores(d)


def _on_tensor_cores(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


@functools.cache
def _installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "late_interaction_kernels"))
