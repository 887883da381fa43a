"""Two and three processes that share their documents have, on average, the gradients of one with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import st_colbert_losses
from tests.encoder import Encoder
from tests.ranks import run_ranks

NAMES = [
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertPairwiseCELoss",
    "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
]
SHAPES = {2: [(4, 4), (5, 3)], 3: [(3, 3, 3), (1, 4, 2)]}
OPTIONS = [
    {},
    {"pos_aware_negative_filtering": True, "filter_threshold": 0.5},
    {"normalize_scores": False, "temperature": 5.0},
    {"use_smooth_max": True},
    {"mask_duplicate_documents": False},
]


def whole_batch(rows: int, columns: int, step: int) -> list[dict]:
    """Equal queries, copies of positives and labels that lie on different ranks; rows of other lengths."""
    generator = torch.Generator().manual_seed(100 * rows + step)
    features = []
    for _ in range(columns):
        lengths = torch.randint(1, 6, (rows,), generator=generator)
        ids = torch.randint(0, 50, (rows, 6), generator=generator)
        features.append({"input_ids": ids, "attention_mask": (torch.arange(6) < lengths[:, None]).long()})
    copied = [(0, 0, rows - 1), (1, 1, rows - 2)]  # (column, from, to): one query twice, one positive twice
    for column, source, target in copied:
        for value in features[column].values():
            value[target] = value[source]
    return features


def of_rank(features: list[dict], sizes: tuple[int, ...], rank: int) -> list[dict]:
    """The rank's rows, cut to its own longest."""
    begin = sum(sizes[:rank])
    part = [{key: value[begin : begin + sizes[rank]] for key, value in column.items()} for column in features]
    widths = [max(1, int(column["attention_mask"].sum(1).max())) for column in part]
    return [
        {key: value[:, :width] for key, value in column.items()} for column, width in zip(part, widths, strict=True)
    ]


def masked(features: list[dict], labels: torch.Tensor, last: slice) -> None:
    """The last rank has no token that is scored."""
    for column in features:
        column["attention_mask"][last] = 0


def idle(features: list[dict], labels: torch.Tensor, last: slice) -> None:
    """The last rank has no negatives: others have no documents, and its own share a label."""
    for column in features[1:]:
        column["attention_mask"][: last.start] = 0
    labels[last] = 1000


def check_rank(rank: int, world: int) -> None:
    for sizes in SHAPES[world]:
        for name in NAMES:
            for form in ("", "Cached", "MoCo"):
                for options in OPTIONS if form == "" else OPTIONS[:1]:
                    check(rank, sizes, form, name, options)
    for name in NAMES:
        for form in ("", "Cached", "MoCo"):
            check(rank, SHAPES[world][1], form, name, {"temperature": 0.5}, dtype=torch.float32)
            for spoil in (masked, idle) if form == "" or name == "ColbertLoss" else ():
                check(rank, SHAPES[world][1], form, name, {}, spoil=spoil)
    refuse_other_columns(rank)


def check(
    rank: int,
    sizes: tuple[int, ...],
    form: str,
    name: str,
    options: dict,
    dtype: torch.dtype = torch.float64,
    spoil: Callable[[list[dict], torch.Tensor, slice], None] | None = None,
) -> None:
    options = {"temperature": 0.3, **options}
    rows, tolerance = sum(sizes), 1e-10 if dtype == torch.float64 else 1e-6
    torch.manual_seed(7)
    encoder = Encoder().to(dtype)
    alone = copy.deepcopy(encoder)
    ddp = nn.parallel.DistributedDataParallel(encoder, broadcast_buffers=False)
    extra = {"": {}, "Cached": {"mini_batch_size": 2}, "MoCo": {"queue_size": 10, "momentum": 0.8}}[form]
    cls = getattr(st_colbert_losses, form + name)
    together = cls(ddp, gather_across_devices=True, **options, **extra)
    single = cls(alone, **options, **extra)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (encoder, alone)]
    for step in range(3 if form == "MoCo" else 1):
        features, labels = whole_batch(rows, 3, step), torch.arange(rows) % (rows - 1) + 10 * step
        if spoil is not None:
            spoil(features, labels, slice(rows - sizes[-1], rows))
        begin = sum(sizes[:rank])
        value = together(of_rank(features, sizes, rank), labels[begin : begin + sizes[rank]])
        expected = one_process(single, features, labels)
        weighted = value.detach() * sizes[rank] / rows
        torch.distributed.all_reduce(weighted)
        torch.testing.assert_close(weighted, expected.detach(), rtol=tolerance, atol=tolerance)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        expected.backward()
        largest = max(float(p.grad.abs().max()) for p in alone.parameters())
        assert largest > 1e-3
        for mine, theirs in zip(encoder.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=tolerance * largest)
        for optimizer in optimizers:
            optimizer.step()
        if form == "MoCo":
            same_queues(together, single, tolerance)


def one_process(loss: nn.Module, features: list[dict], labels: torch.Tensor) -> torch.Tensor:
    """A process group is there, so say that this loss is to take no notice of it."""
    loss.gather_across_devices = False
    return loss(features, labels)


def same_queues(together: nn.Module, single: nn.Module, tolerance: float) -> None:
    """Documents and their order: on every rank those of one process."""
    mine, theirs = together.queue.state(), single.queue.state()
    torch.testing.assert_close(mine["vectors"], theirs["vectors"], rtol=10 * tolerance, atol=10 * tolerance)
    for what in ("lengths", "keys", "labels"):
        assert torch.equal(mine[what], theirs[what])


def refuse_other_columns(rank: int) -> None:
    loss = st_colbert_losses.ColbertLoss(Encoder(), gather_across_devices=True)
    with pytest.raises(ValueError, match="ColbertLoss: got processes with"):
        loss(whole_batch(3, 2 + rank, 0))


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(world, tmp_path):
    """Every objective and form; unequal rows, other widths, copies and labels across ranks, a rank without tokens."""
    run_ranks(check_rank, world, tmp_path, world)


def test_without_other_processes_it_changes_nothing():
    encoder, features = Encoder(), whole_batch(5, 3, 0)
    for name in NAMES:
        loss = getattr(st_colbert_losses, name)(encoder)
        value = loss(features)
        loss.gather_across_devices = True
        assert loss(features) == value
