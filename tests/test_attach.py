"""Which losses a Trainer has, wherever they stand: each is saved and restored by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from st_colbert_losses import ColbertLoss, ColbertSigmoidLoss, LateInteractionLoss, MoCoColbertLoss
from tests.encoder import Encoder
from tests.test_resume import SAVED, assert_equal, run


def queue(model: nn.Module, size: int, momentum: float) -> MoCoColbertLoss:
    return MoCoColbertLoss(model, queue_size=size, momentum=momentum, temperature=0.1)


class Sum(nn.Module):
    """A user's loss of two of ours."""

    remembers = False  # run() is not to ask for its state

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.a, self.b = queue(model, 9, 0.7), queue(model, 20, 0.2)

    def forward(self, features, labels=None):
        features = list(features)
        return self.a(features, labels) + self.b(features, labels)


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / f"checkpoint-{SAVED}").glob("_st_colbert_losses*")}


def resumed(build, folder: Path) -> tuple:
    """What a whole training and one that resumes end with."""
    built = []

    def keep(model):
        built.append(build(model))
        return built[-1]

    weights = [
        run(keep, folder / "whole")[0],
        run(keep, folder / "resumed", resume=folder / "whole" / f"checkpoint-{SAVED}")[0],
    ]
    return weights, built


def test_one_loss_of_two_datasets(tmp_path):
    def build(model):
        loss = queue(model, 9, 0.7)
        return {"one": loss, "two": loss}

    weights, built = resumed(build, tmp_path)
    assert_equal(*weights)
    assert_equal(*(losses["one"].own_state() for losses in built))
    assert files(tmp_path / "whole") == {"_st_colbert_losses_one.pt"}


def test_two_losses_in_one_module(tmp_path):
    weights, built = resumed(Sum, tmp_path)
    assert_equal(*weights)
    for name in ("a", "b"):
        assert_equal(*(getattr(both, name).own_state() for both in built))
    assert len(built[0].a.queue) == 9
    assert len(built[0].b.queue) == 20
    assert files(tmp_path / "whole") == {"_st_colbert_losses_a.pt", "_st_colbert_losses_b.pt"}


class Scaled(nn.Module):
    """An objective with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.gradients: list[torch.Tensor | None] = []

    def forward(self, scores):
        self.gradients.append(self.scale.grad)
        return nn.functional.softplus((scores.pool.max(1).values - scores.positive) * self.scale)


def test_an_objective_with_parameters(tmp_path):
    weights, built = resumed(lambda model: LateInteractionLoss(model, Scaled()), tmp_path)
    assert_equal(*weights)
    scales = [loss.objective.scale.item() for loss in built]
    assert scales[0] == scales[1] != 5.0
    assert built[0].objective.gradients == [None] * 6  # zeroed after each step
    assert files(tmp_path / "whole") == {"_st_colbert_losses.pt"}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (MoCoColbertLoss(Encoder()), ColbertLoss(Encoder())),
        (ColbertLoss(Encoder(), learn_temperature=True), ColbertLoss(Encoder(), temperature=0.5)),
        (ColbertLoss(Encoder()), ColbertSigmoidLoss(Encoder(), learn_bias=True)),
    ],
)
def test_the_state_of_another_loss_is_refused(saved, loaded):
    temperature = loaded.temperature
    with pytest.raises(ValueError, match=f"{type(loaded).__name__}: got a state without .* that of the same loss"):
        loaded.load_own_state(saved.own_state())
    assert loaded.temperature == temperature
