"""Further options on several processes: their gradients too are those of one process with the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import st_colbert_losses
from st_colbert_losses import LateInteractionLoss
from st_colbert_losses.draws import draw_negatives
from tests.encoder import Encoder
from tests.ranks import run_ranks
from tests.test_gather import SHAPES, of_rank, one_process, whole_batch

BOTH_WAYS = {"document_to_query_weight": 0.4}
LEARNED = {"learn_temperature": True}
CASES = [
    ("ColbertLoss", BOTH_WAYS),
    ("CachedColbertLoss", {**BOTH_WAYS, "mini_batch_size": 2, **LEARNED}),
    ("ColbertNegativeCELoss", BOTH_WAYS),
    ("ColbertSigmoidLoss", {**LEARNED, "learn_bias": True, "bias": 0.2}),
    ("MoCoColbertPairwiseCELoss", {**LEARNED, "momentum": 0.5, "queue_size": 7}),
    ("ColbertLoss", {"matryoshka_dims": [4, 2], "pos_aware_negative_filtering": True, "filter_mode": "mask"}),
    ("ColbertDistillationLoss", {"contrastive_weight": 0.5}),
    ("ColbertDistillationLoss", {}),
]


def check_rank(rank: int, world: int) -> None:
    for sizes in SHAPES[world]:
        for name, options in CASES:
            check(rank, sizes, name, options)
        objective_with_parameters(rank, sizes)
    draws_differ(rank)


def check(rank: int, sizes: tuple[int, ...], name: str, options: dict) -> None:
    rows, begin = sum(sizes), sum(sizes[:rank])
    torch.manual_seed(7)
    encoder = Encoder().double()
    alone = copy.deepcopy(encoder)
    ddp = nn.parallel.DistributedDataParallel(encoder, broadcast_buffers=False)
    options = {"temperature": 0.3, **options}
    together = getattr(st_colbert_losses, name)(ddp, gather_across_devices=True, **options)
    single = getattr(st_colbert_losses, name)(alone, **options)
    features = whole_batch(rows, 3, 0)
    labels = torch.arange(rows) % (rows - 1)
    if "Distillation" in name:
        labels = torch.rand(rows, 2, generator=torch.Generator().manual_seed(3))
    together(of_rank(features, sizes, rank), labels[begin : begin + sizes[rank]]).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("st_colbert_losses.learned.average_gradients", lambda values: values)
        one_process(single, features, labels).backward()
    largest = max(float(p.grad.abs().max()) for p in alone.parameters())
    assert largest > 1e-3
    for mine, theirs in zip(encoder.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10 * largest)
    for what, theirs in single.shifts.items():  # parameters of the loss, in float32
        assert theirs.grad.abs() > 1e-4
        torch.testing.assert_close(together.shifts[what].grad, theirs.grad, rtol=1e-5, atol=0)


class Scaled(nn.Module):
    """An objective with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, scores):
        return nn.functional.softplus((scores.pool.max(1).values - scores.positive) * self.scale)


def objective_with_parameters(rank: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(7)
    encoder = Encoder().double()
    alone = LateInteractionLoss(copy.deepcopy(encoder), Scaled())
    ddp = nn.parallel.DistributedDataParallel(encoder, broadcast_buffers=False)
    together = LateInteractionLoss(ddp, Scaled(), gather_across_devices=True)
    features = whole_batch(sum(sizes), 3, 0)
    together(of_rank(features, sizes, rank)).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("st_colbert_losses.base.average_gradients", lambda values: values)
        one_process(alone, features, torch.arange(sum(sizes))).backward()
    assert alone.objective.scale.grad.abs() > 1e-4
    torch.testing.assert_close(together.objective.scale.grad, alone.objective.scale.grad, rtol=1e-10, atol=0)


def draws_differ(rank: int) -> None:
    """The same random state on every rank, as trainers set it, and the same data: other draws."""
    torch.manual_seed(1)
    _, drawn = draw_negatives(whole_batch(8, 7, 0), 2)
    everybody = [torch.empty_like(drawn) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everybody, drawn)
    assert all(not torch.equal(drawn, other) for i, other in enumerate(everybody) if i != rank)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(world, tmp_path):
    run_ranks(check_rank, world, tmp_path, world)
