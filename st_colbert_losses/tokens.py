"""Token embeddings of a batch of queries or documents, with the tokens that count."""

from __future__ import annotations

from torch import Tensor


class Tokens:
    """Token embeddings and the mask of the tokens that are scored.

    Args:
        vectors: (N, T, D) floating point: N queries or documents of up to T tokens in D dimensions.
        mask: (N, T), true where a token is scored; numbers count as true where they are not 0. ``None`` scores every
            token whose vector is not all zero, so batches that were padded with zeros need no mask.

    Raises:
        ValueError: If they are no tensors, or a shape or dtype is not as above.

    Example:
        >>> import torch
        >>> from st_colbert_losses import Tokens
        >>> Tokens(torch.tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 0.0]]])).mask
        tensor([[ True,  True, False]])
    """

    def __init__(self, vectors: Tensor, mask: Tensor | None = None) -> None:
        if not isinstance(vectors, Tensor) or vectors.ndim != 3 or not vectors.is_floating_point():
            raise ValueError(
                f"Tokens: got vectors of {_kind(vectors)}, expected a floating point tensor (N, T, D): rows, tokens, "
                "dimensions. Pass several documents per row as (N * n, T, D), row by row."
            )
        if mask is None:
            mask = vectors.detach().ne(0).any(-1)
        rows_and_tokens = tuple(vectors.shape[:2])
        if not isinstance(mask, Tensor) or mask.shape != rows_and_tokens:
            raise ValueError(
                f"Tokens: got a mask of {_kind(mask)}, expected a tensor of shape {rows_and_tokens}, as the vectors "
                "have. Pass one mask value per token."
            )
        self.vectors = vectors
        self.mask = mask.to(vectors.device).bool()

    def __len__(self) -> int:
        return self.vectors.shape[0]


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"type {type(value).__name__}"
