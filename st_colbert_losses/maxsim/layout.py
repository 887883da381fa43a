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

    On one CPU thread 3 MiB of float32, which stay in the cache. Several threads get more each, up to 24 MiB in all,
    because after every operation they wait for each other, and long where other jobs want the same cores. Elsewhere
    128 MiB, so that a tile's work hides its launches.
    """
    if device.type != "cpu":
        return 8192, 4096
    threads = min(4, torch.get_num_threads())
    return (3072, 256) if threads == 1 else (3072 * threads, 512)


def in_whole_blocks(vectors: Tensor) -> Tensor:
    """Query tokens (M, D) with zeros up to a multiple of 32, again for few shapes."""
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
        shape: (t, L).
        rows: (R,) their tokens' rows in the store, document by document. R is t * L, or more: then rows of no meaning
            fill it up to a multiple of 128, because oneDNN makes, and keeps, a kernel for every new shape.
        repeats: (t, L) true where a token is such a repeat; ``None`` where none is.
        begin: The first row, where the rows lie side by side in the store; else ``None``.
    """

    documents: Tensor
    shape: tuple[int, int]
    rows: Tensor
    repeats: Tensor | None
    begin: int | None

    def gather(self, store: Tensor, dtype: torch.dtype) -> Tensor:
        """(R, D) vectors."""
        if self.begin is None:
            return store.index_select(0, self.rows).to(dtype)
        return store[self.begin : self.begin + len(self.rows)].to(dtype)

    def split(self, values: Tensor) -> Tensor:
        """(R, ...) values of rows to (t, L, ...)."""
        t, length = self.shape
        return values[: t * length].view(t, length, *values.shape[1:])


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
        """All documents, the longest first, in tiles for these query tokens (M, D).

        A tile ends where it is full, or where padding would cost more than one more tile.
        """
        height, width = tile_shape(vectors.device)
        size = height * width // max(1, min(width, len(vectors)))
        order = self.lengths.argsort(descending=True, stable=True)
        begin, padding, lengths = 0, 0, self.lengths[order].tolist()
        for end, length in enumerate(lengths):
            longest = lengths[begin]
            padding += longest - length
            if end > begin and ((end - begin + 1) * longest > size or padding > size / 16):
                yield self._tile(order[begin:end], longest, vectors.device)
                begin, padding = end, 0
        if lengths:
            yield self._tile(order[begin:], lengths[begin], vectors.device)

    def _tile(self, documents: Tensor, longest: int, device: torch.device) -> Tile:
        starts, lengths = self.starts[documents, None], self.lengths[documents, None]
        place = torch.arange(longest)
        repeats = place >= lengths
        rows = (starts + place.minimum(lengths - 1)).flatten()
        if self.rows is None and bool((rows.diff() == 1).all()):
            return Tile(documents, (len(documents), longest), rows.to(device), None, int(rows[0]))
        rows = F.pad(rows, (0, -len(rows) % 128), value=int(rows[-1])).to(device)
        return Tile(
            documents,
            (len(documents), longest),
            rows if self.rows is None else self.rows[rows],
            repeats.to(device) if repeats.any() else None,
            None,
        )
