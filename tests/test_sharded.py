"""FSDP2 on two processes: the direct form has the gradients of one, others say what they need; and DeepSpeed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import st_colbert_losses
from tests.encoder import Encoder
from tests.models import columns, tiny_model
from tests.ranks import run_ranks
from tests.test_gather import of_rank, one_process, whole_batch
from tests.test_losses import NAMES


class Deeper(Encoder):
    """A block that is sharded by itself, as the layers of a model are, inside one that is sharded too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(self.embedding, nn.Linear(6, 6), nn.Tanh())

    def sharded(self) -> Deeper:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(self.embedding, mesh=mesh)
        return fully_shard(self, mesh=mesh)


def check_rank(rank: int) -> None:
    for sizes in ((4, 4), (5, 3)):
        for name in NAMES:
            check(rank, sizes, name, {})
        check(rank, sizes, "MoCoColbertLoss", {"queue_size": 10, "momentum": None})
    refuse()


def check(rank: int, sizes: tuple[int, ...], name: str, extra: dict) -> None:
    torch.manual_seed(7)
    model = Deeper().double()
    alone = copy.deepcopy(model)
    together = getattr(st_colbert_losses, name)(model.sharded(), temperature=0.3, gather_across_devices=True, **extra)
    single = getattr(st_colbert_losses, name)(alone, temperature=0.3, **extra)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    rows = sum(sizes)
    for step in range(2):
        features, labels = whole_batch(rows, 3, step), torch.arange(rows) % (rows - 1)
        begin = sum(sizes[:rank])
        for optimizer in optimizers:
            optimizer.zero_grad()
        together(of_rank(features, sizes, rank), labels[begin : begin + sizes[rank]]).backward()
        one_process(single, features, labels).backward()
        largest = max(float(p.grad.abs().max()) for p in alone.parameters())
        assert largest > 1e-3
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-10 * largest)
        for optimizer in optimizers:
            optimizer.step()


def refuse() -> None:
    model = Deeper()
    early = st_colbert_losses.MoCoColbertLoss(model)  # before the trainer shards it
    model.sharded()
    with pytest.raises(ValueError, match=r"MoCoColbertLoss: got a model under fully_shard .* momentum=None"):
        early(whole_batch(4, 2, 0))
    with pytest.raises(ValueError, match="MoCoColbertLoss: got a model under fully_shard"):
        st_colbert_losses.MoCoColbertLoss(model)
    with pytest.raises(ValueError, match=r"CachedColbertLoss: got a model under fully_shard .* without caching"):
        st_colbert_losses.CachedColbertLoss(model)(whole_batch(4, 2, 0))


def test_two_processes(tmp_path):
    run_ranks(check_rank, 2, tmp_path)


def test_the_first_fsdp_is_refused():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    loss = st_colbert_losses.ColbertLoss(FullyShardedDataParallel(Encoder()))
    with pytest.raises(ValueError, match=r"ColbertLoss: got a model in FullyShardedDataParallel.*fsdp_version: 2"):
        loss(whole_batch(4, 2, 0))


def test_a_deepspeed_engine_is_seen_through():
    """It calls its model with what it is given; its class does not tell which library the model is of."""

    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *arguments, **options):
            return self.module(*arguments, **options)

    model = tiny_model()
    features = columns(model, ["what sings", "one two"], ["bird sings .", "three , two"])
    losses = [st_colbert_losses.ColbertLoss(m, temperature=0.1) for m in (DeepSpeedEngine(model), model)]
    assert losses[0](features) == losses[1](features)
    assert losses[0](features).item() > 0
