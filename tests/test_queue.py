"""The document queue: a ring that keeps the newest documents, packed."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from st_colbert_losses.columns import Column
from st_colbert_losses.queue import DocumentQueue
from st_colbert_losses.tokens import Tokens


def documents(lengths: list[int], dim: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths, default=0) + 1
    mask = torch.arange(width) < torch.tensor(lengths)[:, None] if lengths else torch.zeros(0, width, dtype=torch.bool)
    return torch.randn(len(lengths), width, dim), mask


@settings(deadline=None)
@given(
    capacity=st.integers(1, 7),
    batches=st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=14),
    then=st.lists(st.sampled_from(["nothing", "read", "tighten"]), min_size=14, max_size=14),
)
def test_is_a_list_of_the_newest(capacity, batches, then):
    """Any widths, empty documents, batches across the seam or larger than the queue, read after any of them.

    And in stores of any size: tightened, one has no row behind the last that a document lies in.
    """
    queue, expected = DocumentQueue(capacity), []
    for step, lengths in enumerate(batches):
        vectors, mask = documents(lengths)
        labels = torch.arange(len(lengths)) + 100 * step
        queue.enqueue(vectors, mask, labels=labels)
        expected += [(v[m], int(label)) for v, m, label in zip(vectors, mask, labels, strict=True)]
        expected = expected[-capacity:]
        assert len(queue) == len(expected)
        if then[step] == "read":
            queue.column()
        elif then[step] == "tighten" and (state := queue.state()):
            queue.load(state | {"rows": (state["starts"] + state["lengths"]).max()})
    column = queue.column()
    if not expected:
        assert column is None
        return
    found = [
        column.tokens.vectors[start : start + length]
        for start, length in zip(column.tokens.starts, column.tokens.lengths, strict=True)
    ]
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens, _ in expected]
    assert all(torch.equal(a, b) for a, (b, _) in zip(found, expected, strict=True))
    assert column.labels.tolist() == [label for _, label in expected]
    again = DocumentQueue(capacity)
    again.load(queue.state())
    assert len(again) == len(queue)
    assert all(torch.equal(a, b) for a, b in zip(queue.state().values(), again.state().values(), strict=True))


@pytest.mark.parametrize(
    ("lengths", "starts"), [([0, 3, 3], [3, 3, 0]), ([1, 2, 3], [0, 1, 3]), ([2, 1, 3], [3, 5, 0])]
)
@pytest.mark.parametrize("new", [1, 2, 3])
def test_overwrites_no_document_of_a_full_store(lengths, starts, new):
    """Where the oldest leaves no room, or less than the newest takes by one row."""
    queue, lengths = DocumentQueue(3), torch.tensor(lengths)
    vectors, unknown = torch.randn(6, 3), torch.zeros(3, dtype=torch.long)
    state = {"vectors": vectors, "rows": torch.tensor(6), "starts": torch.tensor(starts), "lengths": lengths}
    queue.load(state | {"keys": unknown, "labels": unknown, "ages": unknown})
    more, mask = documents([new])
    queue.enqueue(more, mask)
    assert torch.equal(queue.state()["vectors"], torch.cat([vectors[lengths[0] :], more[mask]]))


def test_does_not_grow_once_it_has_wrapped():
    generator = torch.Generator().manual_seed(0)
    queue = DocumentQueue(256)
    sizes = []
    for _ in range(1000):
        lengths = torch.randint(20, 181, (16,), generator=generator).tolist()
        queue.enqueue(*documents(lengths, dim=2))
        sizes.append(queue.column().tokens.vectors.shape[0])
    assert len(set(sizes[16:])) <= 2  # the first full round may correct the estimate of the first batches
    assert len(set(sizes[64:])) == 1
    assert sizes[-1] < 1.35 * 256 * 100


@pytest.mark.parametrize("how", ["resumed", "prefilled"])
def test_needs_no_more_memory_however_it_was_filled(how):
    """As many rows as a queue that was filled batch by batch, then and once it has gone round."""
    generator = torch.Generator().manual_seed(0)

    def batch(n: int):
        return documents(torch.randint(20, 181, (n,), generator=generator).tolist(), dim=2)

    def rows(queue: DocumentQueue) -> int:
        return queue.column().tokens.vectors.shape[0]

    grown, queue = DocumentQueue(256), DocumentQueue(256)
    for _ in range(64):
        grown.enqueue(*batch(16))
        grown.column()
    if how == "resumed":
        queue.load(grown.state())
    else:
        queue.enqueue(*batch(256))
    assert rows(queue) <= 1.1 * rows(grown)
    for _ in range(64):
        queue.enqueue(*batch(16))
        assert rows(queue) <= 1.1 * rows(grown)


def test_a_state_is_no_larger_than_its_documents():
    queue = DocumentQueue(4)
    for _ in range(3):
        queue.enqueue(*documents([9, 1, 4]))
        queue.column()
    assert queue.state()["vectors"].shape[0] == 9 + 1 + 4 + 4


def test_a_smaller_queue_takes_the_newest_of_a_state():
    queue, smaller = DocumentQueue(6), DocumentQueue(2)
    for _ in range(3):
        queue.enqueue(*documents([5, 6, 7, 8]))
        queue.column()
    smaller.load(queue.state())
    assert smaller.state()["lengths"].tolist() == [7, 8]
    assert torch.equal(smaller.state()["vectors"], queue.state()["vectors"][-15:])
    assert smaller.column().tokens.vectors.shape[0] <= 3 * 8


def test_a_small_queue_does_not_grow_at_every_turn():
    """One document of room is enough for the gap before the seam, where few documents even nothing out."""
    queue, stores = DocumentQueue(3), []
    for length in (9, *torch.randint(1, 10, (200,)).tolist()):
        queue.enqueue(*documents([length]))
        stores.append(queue.column().tokens.vectors)
    assert len({store.data_ptr() for store in stores[3:]}) == 1


def test_memory():
    """4,096 documents of 20..180 tokens in bfloat16: about 100 MB, where padding in float32 takes 378 MB."""
    generator = torch.Generator().manual_seed(0)
    queue = DocumentQueue(4096, torch.bfloat16)
    for _ in range(5000 // 64):
        lengths = torch.randint(20, 181, (64,), generator=generator).tolist()
        queue.enqueue(*documents(lengths, dim=128))
        queue.column()
    vectors = queue.column().tokens.vectors
    assert vectors.dtype == torch.bfloat16
    assert vectors.numel() * 2 < 115e6


def test_tells_its_size_at_the_first_document_and_when_full(caplog):
    queue = DocumentQueue(4)
    with caplog.at_level(logging.INFO, "st_colbert_losses"):
        for _ in range(5):
            queue.enqueue(*documents([2, 3]))
            queue.column()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("DocumentQueue: holds 2 of 4 documents in")
    assert messages[1].startswith("DocumentQueue: holds 4 of 4 documents in")
    assert "MiB of float32" in messages[1]


def test_pending_documents_count_and_are_cleared():
    queue = DocumentQueue(4)
    queue.enqueue(*documents([1, 2, 3]))
    assert len(queue) == 3
    assert queue.state()["lengths"].tolist() == [1, 2, 3]
    queue.enqueue(*documents([4]))
    queue.clear()
    assert len(queue) == 0
    assert queue.column() is None
    assert queue.state() == {}


def test_pending_documents_that_would_not_stay_are_dropped():
    """Nothing reads a queue during ``warmup_steps``; it holds no more than one batch above its capacity meanwhile."""
    queue = DocumentQueue(5)
    for step in range(20):
        queue.enqueue(*documents([2, 3]), labels=torch.tensor([2 * step, 2 * step + 1]))
    assert sum(len(block.lengths) for block in queue._pending) <= 5 + 2
    assert queue.mean_age == (0 + 0 + 1 + 1 + 2) / 5
    assert queue.column().labels.tolist() == [35, 36, 37, 38, 39]


def test_follows_the_device_that_is_asked_for():
    """``meta`` stands for an accelerator: it refuses to work together with tensors of the CPU as those do."""
    other = torch.device("meta")
    queue, prefilled = DocumentQueue(5), DocumentQueue(5)
    queue._told.add("epoch")  # there are no values to look at
    prefilled.enqueue(*documents([2, 3]), labels=torch.tensor([1, 2]))
    queue.load(prefilled.state())
    for _ in range(5):
        column = queue.column(other)
        assert {t.device for t in (column.tokens.vectors, column.rows, column.labels, column.keys)} == {other}
        assert column.tokens.lengths.device.type == "cpu"
        queue.enqueue(*documents([4, 1]))  # of the CPU
    assert queue.column().tokens.vectors.device == other
    assert prefilled.column().tokens.vectors.device.type == "cpu"


def test_scores_that_need_no_gradient_keep_nothing():
    queue = DocumentQueue(4)
    for _ in range(3):
        queue.enqueue(*documents([2, 3]))
        queue.column()
    store = queue.column().tokens.vectors
    queue.lend(torch.rand(2))
    queue.enqueue(*documents([2, 3]))
    assert queue.column().tokens.vectors.data_ptr() == store.data_ptr()


@pytest.mark.parametrize("pending", [True, False])
def test_refuses_other_dimensions_and_loses_nothing(pending):
    queue = DocumentQueue(8)
    queue.enqueue(torch.rand(2, 5, 4))
    if not pending:
        queue.column()
    with pytest.raises(ValueError, match=r"DocumentQueue: got embeddings of 6 dimensions, expected 4"):
        queue.enqueue(torch.rand(2, 5, 6))
    queue.enqueue(torch.rand(2, 5, 4))
    assert queue.column().tokens.vectors.shape[1] == 4
    assert len(queue) == 4


def test_refuses_what_does_not_fit():
    queue = DocumentQueue(4)
    queue.enqueue(*documents([1]))
    queue.column()
    with pytest.raises(ValueError, match=r"DocumentQueue: got .* labels of shape \(3,\)"):
        queue.enqueue(*documents([1]), labels=torch.arange(3))
    with pytest.raises(ValueError, match=r"Tokens: got vectors of shape"):
        queue.enqueue(torch.rand(2, 3))


@pytest.mark.parametrize(("capacity", "warns"), [(128, False), (192, False), (320, False), (800, True)])
def test_outliving_an_epoch_is_no_matter_of_chance(capacity, warns, caplog):
    """Shuffled epochs of 384 documents: at their seams many come again by chance."""
    generator = torch.Generator().manual_seed(0)
    queue = DocumentQueue(capacity)
    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        for _ in range(8):
            for keys in torch.randperm(384, generator=generator).split(8):
                tokens = Tokens(torch.ones(len(keys), 1, 2), torch.ones(len(keys), 1, dtype=torch.bool))
                queue.append(Column(tokens, torch.arange(len(keys)), None, keys + 1))
                queue.column()
    assert ("outlive an epoch" in caplog.text) == warns


def test_a_state_of_another_dtype_takes_that_of_the_queue():
    single, half = DocumentQueue(4), DocumentQueue(4, torch.bfloat16)
    single.enqueue(*documents([2, 3]))
    half.load(single.state())
    assert half.column().tokens.vectors.dtype == torch.bfloat16
    assert half.state()["vectors"].dtype == torch.bfloat16
