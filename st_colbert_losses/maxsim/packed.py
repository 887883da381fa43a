"""Documents of any lengths in one flat store, without padding."""

from __future__ import annotations

import torch
from torch import Tensor


class PackedTokens:
    """Token embeddings of K documents, packed one after another: what a queue of documents keeps.

    They receive no gradient.

    Args:
        vectors: (R, D) floating point, the tokens of all documents; rows that belong to no document are never read.
        lengths: (K,) integers: the tokens of each document, 0 for an empty one. On the CPU they spare a CUDA
            synchronisation.
        starts: (K,) integers: the row of each document's first token. ``None``: the documents follow each other
            without gaps. Starts that rise keep the memory of a backward pass lowest.

    Raises:
        ValueError: If a shape or dtype is not as above, or a document reaches beyond the vectors.

    Example:
        >>> import torch
        >>> from st_colbert_losses.maxsim import PackedTokens
        >>> len(PackedTokens(torch.randn(7, 4), lengths=torch.tensor([5, 0, 2])))
        3
    """

    def __init__(self, vectors: Tensor, lengths: Tensor, starts: Tensor | None = None) -> None:
        if vectors.ndim != 2 or not vectors.is_floating_point():
            raise ValueError(
                f"PackedTokens: got vectors of shape {tuple(vectors.shape)} and dtype {vectors.dtype}, expected a "
                "floating point tensor (R, D): rows, dimensions. Use Tokens for padded documents."
            )
        lengths = lengths.long()
        starts = lengths.cumsum(0) - lengths if starts is None else starts.long()
        if lengths.ndim != 1 or starts.shape != lengths.shape:
            raise ValueError(
                f"PackedTokens: got lengths of shape {tuple(lengths.shape)} and starts of shape "
                f"{tuple(starts.shape)}, expected (K,) both. Pass one length and one start per document."
            )
        if torch.cat([lengths, starts, vectors.shape[0] - (starts + lengths)]).lt(0).any():
            raise ValueError(
                f"PackedTokens: got a document that lies outside of the {vectors.shape[0]} rows, expected 0 <= start "
                "and start + length <= rows for every document. Check lengths and starts."
            )
        self.vectors = vectors
        self.lengths = lengths
        self.starts = starts

    def __len__(self) -> int:
        return self.lengths.shape[0]
