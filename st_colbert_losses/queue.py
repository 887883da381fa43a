"""The document queue: a ring of packed documents, the oldest leaving first."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from st_colbert_losses.checks import check_labels
from st_colbert_losses.columns import NONE, Column, Queued
from st_colbert_losses.content import content_keys
from st_colbert_losses.maxsim import PackedTokens
from st_colbert_losses.tokens import Tokens

logger = logging.getLogger("st_colbert_losses")


class DocumentQueue:
    """Up to ``capacity`` documents of any widths, without padding.

    Their tokens lie in one store that is a ring as well: documents that come go behind the newest as far as they fit
    there, and on from the first row, where others left. The store grows until the queue is full for the first time.
    Writing is put off until the next read, as the backward pass of the last scores may still need what would be
    overwritten.

    Args:
        capacity: Documents it holds at most.
        dtype: What embeddings are stored in; ``None`` as they come.

    Example:
        >>> import torch
        >>> from st_colbert_losses.queue import DocumentQueue
        >>> queue = DocumentQueue(3)
        >>> queue.enqueue(torch.rand(2, 5, 4))
        >>> queue.enqueue(torch.rand(2, 7, 4))
        >>> len(queue), queue.capacity
        (3, 3)
    """

    def __init__(self, capacity: int, dtype: torch.dtype | None = None) -> None:
        self.capacity = capacity
        self.dtype = dtype
        self._told: set[str] = set()
        self._came, self._came_again = 0, torch.zeros((), dtype=torch.long)  # documents, of late
        self.clear()

    def __len__(self) -> int:
        return min(self.capacity, len(self._starts) + sum(len(block.lengths) for block in self._pending))

    def clear(self) -> None:
        """Empty the queue."""
        self._pending: list[_Block] = []
        self._clock = 0  # batches that were appended
        self._store: Tensor | None = None
        self._lent: object | None = None
        # Of each document, the oldest first. Starts, lengths and when it came stay on the CPU.
        self._starts = self._lengths = self._keys = self._labels = self._born = torch.zeros(0, dtype=torch.long)

    def enqueue(
        self,
        embeddings: Tensor,
        mask: Tensor | None = None,
        *,
        features: Mapping[str, Any] | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Append documents; the oldest make room.

        Args:
            embeddings: (N, T, D), stored without gradient.
            mask: (N, T), true where a token is scored; ``None`` takes every token that is not all zero.
            features: What the documents were encoded from, to recognise copies of a positive.
            labels: (N,) integers.

        Raises:
            ValueError: For shapes that do not fit, or another dimension than the documents before.
        """
        tokens = Tokens(embeddings, mask)
        check_labels("DocumentQueue", labels, len(tokens))
        rows = torch.full((len(tokens),), -1, device=embeddings.device)
        keys = None if features is None else content_keys(features, len(tokens))
        self.append(Column(tokens, rows, labels, keys))

    def append(self, documents: Column) -> None:
        """Append the documents of a batch."""
        vectors, mask = documents.tokens.vectors.detach(), documents.tokens.mask
        known = self._pending[-1].vectors if self._pending else self._store
        if known is not None and vectors.shape[-1] != known.shape[-1]:
            raise ValueError(
                f"DocumentQueue: got embeddings of {vectors.shape[-1]} dimensions, expected {known.shape[-1]}. "
                "Clear it before it holds documents of another model."
            )
        unknown = torch.full((len(mask),), NONE, device=mask.device)
        labels = unknown if documents.labels is None else documents.labels.to(unknown)
        keys = unknown if documents.keys is None else documents.keys.to(unknown)
        self._clock += 1
        lengths = mask.sum(1).cpu()
        block = _Block(
            vectors[mask].to(self.dtype or vectors.dtype), lengths, keys, labels, torch.full_like(lengths, self._clock)
        )
        if len(block.lengths):
            self._pending.append(block.newest(self.capacity))
        while sum(len(block.lengths) for block in self._pending[1:]) >= self.capacity:  # none of the first would stay
            del self._pending[0]

    @property
    def mean_age(self) -> float:
        """How many batches ago its documents came, on average; those of the last batch count 0."""
        born = torch.cat([self._born, *(block.born for block in self._pending)])[-self.capacity :]
        return float((self._clock - born).double().mean()) if len(born) else 0.0

    def column(self, device: torch.device | None = None) -> Queued | None:
        """The documents as candidates that belong to no row, the oldest first; ``None`` while there are none.

        Args:
            device: Where they are kept from now on; ``None`` where they are.
        """
        self._write()
        if self._store is None:
            return None
        if device is not None:
            self._store, self._keys, self._labels = (t.to(device) for t in (self._store, self._keys, self._labels))
        tokens = PackedTokens(self._store, self._lengths, self._starts)
        return Queued(tokens, torch.full_like(self._keys, -1), self._labels, self._keys)

    def lend(self, scores: Tensor) -> None:
        """Leave the store to the backward pass of these scores: until that begins, writes go to a copy.

        While it runs nothing is written, as writing is put off until the next read.
        """
        if not scores.requires_grad:
            return
        ticket = self._lent = object()

        def give_back(_: Tensor) -> None:
            if self._lent is ticket:
                self._lent = None

        scores.register_hook(give_back)  # type: ignore[no-untyped-call] # torch does not type it

    def state(self) -> dict[str, Tensor]:
        """The documents, where they lie, and what is known of them, for a checkpoint."""
        self._write()
        if self._store is None:
            return {}
        return {
            "vectors": self._packed(self._store),
            "rows": torch.tensor(len(self._store)),
            "starts": self._starts,
            "lengths": self._lengths,
            "keys": self._keys,
            "labels": self._labels,
            "ages": self._clock - self._born,
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Hold the documents of a state instead of its own, the newest if they are more than fit.

        They come to lie where they lay, because gradients are summed in an order that follows from it.
        """
        self.clear()
        if not state:
            return
        lengths, born = state["lengths"].cpu(), -state["ages"].cpu()
        vectors = state["vectors"]
        vectors = vectors.to(self.dtype or vectors.dtype)
        block = _Block(vectors, lengths, state["keys"], state["labels"], born)
        if len(lengths) > self.capacity:
            self._pending.append(block.newest(self.capacity))
            return
        self._store = block.vectors.new_empty(int(state["rows"]), block.vectors.shape[-1])
        self._add(block, self._store, state["starts"].cpu())
        self._store[self._rows().to(self._store.device)] = block.vectors
        self._tell()

    def _write(self) -> None:
        while self._pending:
            block = self._pending[0]
            self._tell_if_older_than_an_epoch(block)
            gone = max(0, len(self._starts) + len(block.lengths) - self.capacity)
            self._keep(slice(gone, None))
            behind = self._tokens_behind(block.lengths)
            if self._store is None or behind is None:
                self._store, behind = self._larger(block), len(block.vectors)
            elif self._lent is not None:  # a second forward before the backward of the first
                self._store = self._store.clone()
            self._lent = None
            head = self._head
            self._store[head : head + behind] = block.vectors[:behind]
            self._store[: len(block.vectors) - behind] = block.vectors[behind:]
            starts = block.lengths.cumsum(0) - block.lengths
            self._add(
                block, self._store, torch.where(starts + block.lengths <= behind, head + starts, starts - behind)
            )
            del self._pending[0]
            self._tell()

    def _add(self, block: _Block, store: Tensor, starts: Tensor) -> None:
        self._starts = torch.cat([self._starts, starts])
        self._lengths = torch.cat([self._lengths, block.lengths])
        self._keys, self._labels = (
            torch.cat([old.to(store.device), new.to(store.device)])
            for old, new in ((self._keys, block.keys), (self._labels, block.labels))
        )
        self._born = torch.cat([self._born, block.born])

    def _keep(self, documents: slice) -> None:
        self._starts, self._lengths = self._starts[documents], self._lengths[documents]
        self._keys, self._labels = self._keys[documents], self._labels[documents]
        self._born = self._born[documents]

    @property
    def _head(self) -> int:
        """The row behind the newest document."""
        return int(self._starts[-1] + self._lengths[-1]) if len(self._starts) else 0

    def _tokens_behind(self, lengths: Tensor) -> int | None:
        """How many tokens of new documents go behind the newest; ``None`` if they do not fit into the ring.

        The others go to the first rows of the store. No document is split.
        """
        rows = 0 if self._store is None else len(self._store)
        tail, head, needed = int(self._starts[0]) if len(self._starts) else rows, self._head, int(lengths.sum())
        if head <= tail:  # the documents are around the seam, or none are there
            return needed if head + needed <= tail else None
        fitting = lengths[lengths.cumsum(0) <= rows - head]
        behind = int(fitting.sum())
        return behind if needed - behind <= tail else None

    def _larger(self, block: _Block) -> Tensor:
        """A larger store, which holds the documents from its first row on and has room for a block."""
        lengths = torch.cat([self._lengths, block.lengths]).double()
        longest, needed = float(lengths.max()), float(lengths.sum())
        spread = float(lengths.std()) if len(lengths) > 1 else 0.0
        full = min(
            self.capacity * longest, self.capacity * float(lengths.mean()) + 6 * math.sqrt(self.capacity) * spread
        )
        # One document more, as the last one before the seam may not fit and leave a gap.
        like = block.vectors if self._store is None else self._store
        store = like.new_empty(math.ceil(max(needed, full) + longest), block.vectors.shape[-1])
        if self._store is not None:
            store[: int(self._lengths.sum())] = self._packed(self._store)
        self._starts = self._lengths.cumsum(0) - self._lengths
        return store

    def _packed(self, store: Tensor) -> Tensor:
        """The tokens of all documents, the oldest first, without gaps."""
        return store[self._rows().to(store.device)]

    def _rows(self) -> Tensor:
        """The rows of these tokens in the store."""
        within = torch.arange(int(self._lengths.sum()))
        return within + (self._starts - self._lengths.cumsum(0) + self._lengths).repeat_interleave(self._lengths)

    def _tell_if_older_than_an_epoch(self, block: _Block) -> None:
        """Warn once when, of as many documents as it holds, most were still there when they came again."""
        if "epoch" in self._told:
            return
        keys = block.keys.to(self._keys.device)
        again = torch.isin(keys, self._keys).logical_and(keys != NONE).sum()
        self._came, self._came_again = self._came + len(block.keys), self._came_again + again
        if self._came < self.capacity:
            return
        share = float(self._came_again) / self._came  # waits for a GPU
        self._came, self._came_again = 0, torch.zeros_like(again)
        if share > 0.5:
            self._told.add("epoch")
            logger.warning(
                "DocumentQueue: its %d documents outlive an epoch: most of those that come in are still there. Copies "
                "of a row's positive are no negatives, but the queue adds nothing new; use a smaller one.",
                self.capacity,
            )

    def _tell(self) -> None:
        """Log the memory at the first document and when full."""
        when = "full" if len(self._starts) == self.capacity else "first"
        if when in self._told or self._store is None:
            return
        self._told.add(when)
        mib = self._store.numel() * self._store.element_size() / 2**20
        logger.info(
            "DocumentQueue: holds %d of %d documents in %.1f MiB of %s.",
            len(self._starts),
            self.capacity,
            mib,
            str(self._store.dtype).removeprefix("torch."),
        )


class _Block(NamedTuple):
    """Documents on their way into the queue."""

    vectors: Tensor  # (tokens of all documents, D)
    lengths: Tensor  # (N,) on the CPU
    keys: Tensor  # (N,)
    labels: Tensor  # (N,)
    born: Tensor  # (N,) on the CPU: the batch in which it came

    def newest(self, documents: int) -> _Block:
        gone = max(0, len(self.lengths) - documents)
        first = int(self.lengths[:gone].sum())
        return _Block(self.vectors[first:], *(of_each[gone:] for of_each in self[1:]))
