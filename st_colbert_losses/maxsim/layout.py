"""Which rows of a flat store are the tokens of which query or document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from st_colbert_losses.maxsim.packed import PackedTokens
from st_colbert_losses.tokens import Tokens


class Queries(NamedTuple):
    """The scored tokens of B queries, one after another.

    Attributes:
        vectors: (M, D) in the dtype of the sums.
        cells: (M,) the place of each token in the flattened (B, Q) batch.
        shape: (B, Q).
    """

    vectors: Tensor
    cells: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, tokens: Tokens, dtype: torch.dtype) -> Queries:
        flat = tokens.vectors.flatten(0, 1)
        cells = tokens.mask.flatten().nonzero().squeeze(1)
        if len(cells) < len(flat):
            flat = flat.index_select(0, cells)
        return cls(flat.to(dtype), cells, (tokens.mask.shape[0], tokens.mask.shape[1]))

    def owners(self) -> Tensor:
        """(M,) the query of each token."""
        return self.cells // self.shape[1]

    def sum(self, values: Tensor) -> Tensor:
        """(t, M) values of tokens to (t, B) sums over each query."""
        b, q = self.shape
        if len(self.cells) < b * q:
            values = values.new_zeros(len(values), b * q).index_copy_(1, self.cells, values)
        return values.view(len(values), b, q).sum(-1)


def tile_shape(device: torch.device) -> tuple[int, int]:
    """Document tokens of a tile, and query tokens.

    On the CPU 3 MiB of float32, which stay in the cache; elsewhere 128 MiB, so that a tile's work hides its launches.
    """
    return (3072, 256) if device.type == "cpu" else (8192, 4096)


def in_whole_blocks(vectors: Tensor) -> Tensor:
    """Query tokens (M, D) with zeros up to a multiple of 32: oneDNN makes a kernel for every new shape."""
    return F.pad(vectors, (0, 0, 0, -len(vectors) % 32))


def blocks(vectors: Tensor) -> Iterator[slice]:
    """The query tokens of one tile after the other."""
    width = tile_shape(vectors.device)[1]
    for begin in range(0, len(vectors), width):
        yield slice(begin, min(begin + width, len(vectors)))


class Tile(NamedTuple):
    """A few documents of like length, padded to L tokens by repeating their last one, which cannot change a maximum.

    Attributes:
        documents: (t,) which documents, on the CPU.
        rows: (t, L) their tokens' rows in the store.
        repeats: (t, L) true where a token is such a repeat; ``None`` where none is.
        begin: The first row, where the rows lie side by side in the store; else ``None``.
    """

    documents: Tensor
    rows: Tensor
    repeats: Tensor | None
    begin: int | None

    def gather(self, store: Tensor, dtype: torch.dtype) -> Tensor:
        """(t, L, D) vectors."""
        if self.begin is None:
            vectors = store.index_select(0, self.rows.flatten())
        else:
            vectors = store[self.begin : self.begin + self.rows.numel()]
        return vectors.to(dtype).view(*self.rows.shape, -1)


class Documents(NamedTuple):
    """K documents with at least one scored token each, as rows of a flat store.

    Document k's tokens are ``starts[k]`` to ``starts[k] + lengths[k]``, counted in the store or, where unscored tokens
    lie between them, in ``rows``; all of them lie in ``first[k]`` to ``stop[k]`` of the store. These four are (K,) and
    on the CPU: an accelerator is synchronised to read them, once per call, and not for each tile.
    """

    starts: Tensor
    lengths: Tensor
    first: Tensor
    stop: Tensor
    rows: Tensor | None

    @classmethod
    def of(cls, tokens: Tokens | PackedTokens) -> tuple[Documents, Tensor]:
        """The documents that have a scored token, and their places (K,) among all."""
        rows = None
        if isinstance(tokens, PackedTokens):
            starts, lengths = torch.stack([tokens.starts, tokens.lengths]).cpu()
            first, stop = starts, starts + lengths
        else:
            width = tokens.mask.shape[1]
            lengths = tokens.mask.sum(1).cpu()
            starts = first = torch.arange(len(lengths)) * width
            stop = first + width
            if bool((lengths < width).any()):
                rows = tokens.mask.flatten().nonzero().squeeze(1)
                starts = lengths.cumsum(0) - lengths
        kept = lengths.nonzero().squeeze(1)
        return cls(starts[kept], lengths[kept], first[kept], stop[kept], rows), kept

    def tiles(self, vectors: Tensor) -> Iterator[Tile]:
        """All documents, the longest first, in tiles for these query tokens (M, D)."""
        height, width = tile_shape(vectors.device)
        size = height * width // max(1, min(width, len(vectors)))
        order = self.lengths.argsort(descending=True, stable=True)
        lengths, begin = self.lengths[order].tolist(), 0
        while begin < len(lengths):
            end = begin + max(1, round(size / lengths[begin]))
            yield self._tile(order[begin:end], lengths[begin], vectors.device)
            begin = end

    def _tile(self, documents: Tensor, longest: int, device: torch.device) -> Tile:
        starts, lengths = self.starts[documents, None], self.lengths[documents, None]
        place = torch.arange(longest)
        rows = starts + place.minimum(lengths - 1)
        padded = bool((lengths < longest).any())
        side_by_side = self.rows is None and bool((rows.flatten().diff() == 1).all())
        begin = int(rows[0, 0]) if side_by_side else None
        rows = rows.to(device)
        if self.rows is not None:
            rows = self.rows[rows]
        return Tile(documents, rows, (place >= lengths).to(device) if padded else None, begin)
