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

    Their tokens lie in one store that is a ring as well: the documents of a batch are one block, and the blocks of
    documents that left make room. The store grows until the queue is full for the first time. Writing is put off until
    the next read, as the backward pass of the last scores may still need what would be overwritten.

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
        self._writes = 0
        self.clear()

    def __len__(self) -> int:
        return min(self.capacity, len(self._starts) + sum(len(block.lengths) for block in self._pending))

    def clear(self) -> None:
        """Empty the queue."""
        self._pending: list[_Block] = []
        self._clock = 0  # batches that were appended
        self._store: Tensor | None = None
        self._head = 0  # the row behind the newest document
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
        if self._store is not None and vectors.shape[-1] != self._store.shape[-1]:
            raise ValueError(
                f"DocumentQueue: got embeddings of {vectors.shape[-1]} dimensions, expected {self._store.shape[-1]}. "
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

    @property
    def mean_age(self) -> float:
        """How many batches ago its documents came, on average; those of the last batch count 0."""
        born = torch.cat([self._born, *(block.born for block in self._pending)])[-self.capacity :]
        return float((self._clock - born).double().mean()) if len(born) else 0.0

    def column(self) -> Queued | None:
        """The documents as candidates that belong to no row, the oldest first; ``None`` while there are none."""
        self._write()
        if self._store is None or not len(self._starts):
            return None
        tokens = PackedTokens(self._store, self._lengths, self._starts)
        return Queued(tokens, torch.full_like(self._keys, -1), self._labels, self._keys)

    def lend(self, scores: Tensor) -> None:
        """Keep the store as it is until the backward pass of these scores has read it."""
        ticket = self._lent = object()

        def give_back(_: Tensor) -> None:
            if self._lent is ticket:
                self._lent = None

        if scores.requires_grad:
            scores.register_hook(give_back)  # type: ignore[no-untyped-call] # torch does not type it

    def state(self) -> dict[str, Tensor]:
        """The documents and what is known of them, for a checkpoint."""
        self._write()
        if self._store is None:
            return {}
        return {
            "vectors": self._packed(self._store),
            "lengths": self._lengths,
            "keys": self._keys,
            "labels": self._labels,
            "ages": self._clock - self._born,
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Hold the documents of a state instead of its own, the newest if they are more than fit."""
        self.clear()
        if state:
            born = -state["ages"].cpu()
            block = _Block(state["vectors"], state["lengths"].cpu(), state["keys"], state["labels"], born)
            self._pending.append(block.newest(self.capacity))

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        for block in pending:
            self._tell_if_older_than_an_epoch(block)
            gone = max(0, len(self._starts) + len(block.lengths) - self.capacity)
            self._keep(slice(gone, None))
            if self._store is not None and self._store.device != block.vectors.device:
                self._store = self._store.to(block.vectors.device)
            start = self._room_for(len(block.vectors))
            if self._store is None or start is None:
                start = self._grow(block)
            elif self._lent is not None:  # a second forward before the backward of the first
                self._store = self._store.clone()
            self._lent = None
            if self._store is not None:
                self._store[start : start + len(block.vectors)] = block.vectors
            self._head = start + len(block.vectors)
            self._starts = torch.cat([self._starts, start + block.lengths.cumsum(0) - block.lengths])
            self._lengths = torch.cat([self._lengths, block.lengths])
            self._keys = torch.cat([self._keys.to(block.keys.device), block.keys])
            self._labels = torch.cat([self._labels.to(block.labels.device), block.labels])
            self._born = torch.cat([self._born, block.born])
            self._tell()

    def _keep(self, documents: slice) -> None:
        self._starts, self._lengths = self._starts[documents], self._lengths[documents]
        self._keys, self._labels = self._keys[documents], self._labels[documents]
        self._born = self._born[documents]

    def _room_for(self, tokens: int) -> int | None:
        """Where a block fits into the ring without touching a document, or ``None``."""
        rows = 0 if self._store is None else len(self._store)
        if not len(self._starts):
            return 0 if tokens <= rows else None
        tail, head = int(self._starts[0]), self._head
        if tail < head:  # documents in the middle, room behind and before them
            return head if head + tokens <= rows else 0 if tokens <= tail else None
        return head if head + tokens <= tail else None

    def _grow(self, block: _Block) -> int:
        """Move the documents to a larger store, and tell where the block goes."""
        lengths = torch.cat([self._lengths, block.lengths]).double()
        n, longest, needed = len(block.vectors), float(lengths.max()), float(lengths.sum())
        spread = float(lengths.std()) if len(lengths) > 1 else 0.0
        full = min(
            self.capacity * longest, self.capacity * float(lengths.mean()) + 4 * math.sqrt(self.capacity) * spread
        )
        # One block more, as the last one before the seam may not fit and leave a gap.
        store = block.vectors.new_empty(math.ceil(max(needed, full)) + n, block.vectors.shape[-1])
        kept = int(self._lengths.sum())
        if self._store is not None:
            store[:kept] = self._packed(self._store)
        self._store = store
        self._starts = self._lengths.cumsum(0) - self._lengths
        return kept

    def _packed(self, store: Tensor) -> Tensor:
        """The tokens of all documents, the oldest first, without gaps."""
        rows = self._starts.repeat_interleave(self._lengths)
        within = torch.arange(len(rows)) - (self._lengths.cumsum(0) - self._lengths).repeat_interleave(self._lengths)
        return store[(rows + within).to(store.device)]

    def _tell_if_older_than_an_epoch(self, block: _Block) -> None:
        """Warn once when documents come round while their older copies are still there."""
        self._writes += 1
        if "epoch" in self._told or (self._keys.device.type != "cpu" and self._writes % 64):  # a look waits for a GPU
            return
        known = block.keys[block.keys != NONE]
        if len(known) and torch.isin(known, self._keys.to(known.device)).double().mean() > 0.5:
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
