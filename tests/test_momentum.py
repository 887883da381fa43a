"""The momentum encoder: what it copies, how it follows, and which optimizer steps it hears of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from st_colbert_losses import MoCoColbertLoss, MoCoColbertSigmoidLoss
from tests.encoder import Encoder, batch


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "fused"])
@pytest.mark.parametrize("cached", [{}, {"mini_batch_size": 2}])
def test_one_move_and_one_batch_per_step(optimizer, cached):
    """Four micro-batches a step: four batches in the queue, one move; another model's optimizer moves nothing."""
    encoder, other = Encoder(), nn.Linear(2, 2)
    moco = MoCoColbertLoss(encoder, queue_size=100, momentum=0.5, **cached)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    }[optimizer]
    mine, theirs = make(moco.parameters()), make(other.parameters())
    for step in range(3):
        for _ in range(4):
            (moco(batch(rows=2)) / 4).backward()
        before = [p.clone() for p in moco.momentum_model.parameters()]
        other(torch.rand(1, 2)).sum().backward()
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(before, moco.momentum_model.parameters(), strict=True))
        mine.step()
        for old, new, live in zip(before, moco.momentum_model.parameters(), encoder.parameters(), strict=True):
            torch.testing.assert_close(new, (old + live) / 2, rtol=1e-6, atol=1e-7)
        assert moco.steps == step + 1
        assert len(moco.queue) == 8 * (step + 1)


def test_skipped_steps_do_not_count():
    encoder = Encoder()
    moco = MoCoColbertLoss(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=True)
    moco(batch()).backward()
    optimizer.found_inf = torch.tensor(1.0)  # what a gradient scaler sets on a fused optimizer after an overflow
    optimizer.grad_scale = torch.tensor(1.0)
    optimizer.step()
    assert moco.steps == 0
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert moco.steps == 1


def test_a_shared_momentum_encoder_moves_once():
    encoder = Encoder()
    first = MoCoColbertLoss(encoder, momentum=0.5)
    second = MoCoColbertSigmoidLoss(encoder, momentum=0.5, momentum_model=first.momentum_model)
    assert second.momentum_model is first.momentum_model
    assert second.queue is not first.queue
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    before = [p.clone() for p in first.momentum_model.parameters()]
    (first(batch()) + second(batch())).backward()
    optimizer.step()
    for old, new, live in zip(before, first.momentum_model.parameters(), encoder.parameters(), strict=True):
        torch.testing.assert_close(new, (old + live) / 2, rtol=1e-6, atol=1e-7)
    assert first.steps == second.steps == 1


def test_frozen_parameters_are_shared_and_buffers_copied():
    class Adapted(Encoder):
        def __init__(self):
            super().__init__()
            self.embedding.requires_grad_(False)
            self.register_buffer("scale", torch.ones(1))

    encoder = Adapted()
    moco = MoCoColbertLoss(encoder, momentum=0.5)
    assert moco.momentum_model.embedding.weight is encoder.embedding.weight
    assert moco.momentum_model.linear.weight is not encoder.linear.weight
    assert "embedding.weight" not in moco.state_dict()["memory._extra_state"]["momentum_model"]
    encoder.scale.fill_(3)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    moco(batch()).backward()
    optimizer.step()
    assert moco.momentum_model.scale.item() == 3
    again = MoCoColbertLoss(Adapted(), momentum=0.5)
    again.load_state_dict(moco.state_dict())
    assert torch.equal(again.momentum_model.linear.weight, moco.momentum_model.linear.weight)


def test_the_momentum_encoder_follows_device_dtype_and_trains_nothing():
    encoder = Encoder(dropout=0.5)
    moco = MoCoColbertLoss(encoder)
    encoder.double()
    moco.train()
    value = moco(batch())
    assert value.dtype == torch.float64
    assert next(moco.momentum_model.parameters()).dtype == torch.float64
    assert not moco.momentum_model.training
    assert {id(p) for p in moco.parameters()} == {id(p) for p in encoder.parameters()}
    assert all("momentum" not in name for name, _ in moco.named_modules())


def test_models_that_cannot_be_copied():
    class Caches(Encoder):
        def forward(self, features):
            output = super().forward(features)
            self.last = output["token_embeddings"]  # no leaf: deepcopy refuses it
            return output

    encoder = Caches()
    encoder(batch()[0])
    with pytest.raises(ValueError, match=r"MoCoColbertLoss: got a model that cannot be copied .*momentum_model="):
        MoCoColbertLoss(encoder)
    moco = MoCoColbertLoss(encoder, momentum_model=Encoder())
    moco(batch()).backward()
    with pytest.raises(ValueError, match=r"got a momentum_model whose parameter 'embedding.weight' has shape None"):
        MoCoColbertLoss(encoder, momentum_model=nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_moves_of_half_precision_are_not_lost(dtype):
    """A hundredth of what an optimizer moves a weight by is below bfloat16's rounding."""

    def run(steps: int, moco: nn.Module) -> torch.Tensor:
        optimizer = torch.optim.SGD(moco.model.parameters(), lr=0.0)
        for _ in range(steps):
            moco.model.linear.weight.grad = torch.zeros_like(moco.model.linear.weight)
            optimizer.step()
        return moco.momentum_model.linear.weight.detach().clone()

    moco = MoCoColbertLoss(Encoder().to(dtype), momentum=0.99)
    start = moco.momentum_model.linear.weight.detach().clone()
    with torch.no_grad():
        moco.model.linear.weight.mul_(1.1)
    halfway = copy.deepcopy(moco)
    run(50, halfway)
    resumed = MoCoColbertLoss(copy.deepcopy(moco.model), momentum=0.99)
    resumed.load_state_dict(copy.deepcopy(halfway.state_dict()))
    found = run(100, moco)
    expected = start.double() * (0.99**100 + 1.1 * (1 - 0.99**100))
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0)
    assert found.dtype == dtype
    assert torch.equal(run(50, resumed), found)


def test_a_model_that_changes_after_the_loss_was_made():
    encoder = Encoder()
    encoder.embedding.requires_grad_(False)
    moco = MoCoColbertLoss(encoder, momentum=0.5)
    assert moco.momentum_model.embedding.weight is encoder.embedding.weight
    encoder.embedding.requires_grad_(True)  # unfrozen
    old = encoder.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    moco(batch()).backward()
    optimizer.step()
    moved = encoder.embedding.weight
    assert not torch.equal(moved, old)
    torch.testing.assert_close(moco.momentum_model.embedding.weight, (old + moved) / 2)
    assert "embedding.weight" in moco.state_dict()["memory._extra_state"]["momentum_model"]

    encoder.adapter = nn.Linear(4, 4)  # as PEFT does
    with pytest.raises(ValueError, match=r"'adapter.weight' has shape None, .* make the loss after adapters"):
        moco(batch())


def test_another_model_starts_anew():
    """What a Trainer with ``model_init`` does for each trial."""
    first = Encoder()
    first.embedding.requires_grad_(False)
    weights = first.embedding.weight.detach().clone()
    moco = MoCoColbertLoss(first, momentum=0.5, learn_temperature=True)
    moco.shifts["temperature"].data.fill_(1.0)
    moco(batch())
    moco.model = moco.model  # the same: nothing changes
    assert len(moco.queue) == 7
    other = Encoder()
    other.embedding.requires_grad_(False)
    moco.model = other
    assert torch.equal(first.embedding.weight, weights)  # shared by the encoder that was
    assert moco.momentum_model.embedding.weight is other.embedding.weight
    assert len(moco.queue) == 0
    assert moco.temperature == 0.02
    assert torch.equal(moco.momentum_model.linear.weight, other.linear.weight)
    assert moco.momentum_model.linear.weight is not other.linear.weight


def test_the_model_is_no_momentum_encoder_of_its_own():
    encoder = Encoder()
    with pytest.raises(ValueError, match=r"shares the parameter 'embedding.weight', .* expected a copy"):
        MoCoColbertLoss(encoder, momentum_model=encoder)
    assert all(p.requires_grad for p in encoder.parameters())


def test_a_frozen_first_layer_does_not_hide_a_new_dtype():
    encoder = Encoder()
    encoder.embedding.requires_grad_(False)
    moco = MoCoColbertLoss(encoder)
    encoder.double()
    assert moco(batch()).dtype == torch.float64
    assert moco.momentum_model.linear.weight.dtype == torch.float64


def test_optimizers_that_share_out_the_parameters_make_one_step():
    encoder = Encoder()
    moco = MoCoColbertLoss(encoder)
    first = torch.optim.SGD(encoder.embedding.parameters(), lr=0.1)
    second = torch.optim.SGD(encoder.linear.parameters(), lr=0.1)
    for step in range(1, 4):
        moco(batch()).backward()
        first.step()
        second.step()
        assert moco.steps == step
    whole = torch.optim.SGD(encoder.parameters(), lr=0.1)
    whole.step()
    whole.step()
    assert moco.steps == 5
