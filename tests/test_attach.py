"""Which losses a Trainer has, wherever they stand: each is saved and restored by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from st_colbert_losses import ColbertLoss, ColbertSigmoidLoss, LateInteractionLoss, MoCoColbertLoss
from tests.encoder import Encoder
from tests.models import tiny_model
from tests.test_resume import SAVED, assert_equal, run
from tests.test_trainers import WorldTrainer, through_compile


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


def test_the_best_checkpoint_is_the_losses_too(tmp_path):
    """``load_best_model_at_end`` takes the model back, so what follows it goes back with it."""
    kept = {}

    class FirstIsBest(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            args.load_best_model_at_end = True
            state.best_model_checkpoint = str(Path(args.output_dir, f"checkpoint-{SAVED}"))

    def build(model):
        kept["loss"] = queue(model, 9, 0.7)
        return kept["loss"]

    run(build, tmp_path, callbacks=[FirstIsBest()])
    at_best = torch.load(tmp_path / f"checkpoint-{SAVED}" / "_st_colbert_losses.pt")
    assert at_best["_extra_state"]["steps"] == SAVED
    assert_equal(kept["loss"].own_state(), at_best)


def test_a_damaged_state_is_named(tmp_path):
    run(lambda model: queue(model, 9, 0.7), tmp_path / "whole")
    file = tmp_path / "whole" / f"checkpoint-{SAVED}" / "_st_colbert_losses.pt"
    file.write_bytes(b"abcd")
    with pytest.raises(ValueError, match=rf"MoCoColbertLoss: got {file}, which cannot be read .* remove the file"):
        run(lambda model: queue(model, 9, 0.7), tmp_path / "resumed", resume=file.parent)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "st_colbert_losses"]


def test_a_loss_for_another_model_object(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        run(lambda model: ColbertLoss(model, temperature=0.1), tmp_path / "right")
        assert warnings_of(caplog) == []
        run(lambda model: ColbertLoss(tiny_model(), temperature=0.1), tmp_path / "wrong")
    (message,) = warnings_of(caplog)
    assert message.startswith("ColbertLoss: the Trainer's optimizer holds no parameter of the model")


def test_a_frozen_model_is_no_other_model(tmp_path, caplog):
    def build(model):
        return ColbertLoss(model.requires_grad_(False), temperature=0.1, learn_temperature=True)

    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        run(build, tmp_path)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("whole", [True, False])
def test_an_optimizer_without_what_is_learned(whole, tmp_path, caplog):
    made = {}

    class OwnOptimizer(WorldTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD((made["loss"] if whole else self.model).parameters(), lr=1e-2)
            return self.optimizer

    def build(model):
        made["loss"] = ColbertLoss(model, temperature=0.1, learn_temperature=True)
        return made["loss"]

    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        run(build, tmp_path, trainer=OwnOptimizer)
    assert [message.partition(". ")[0] for message in warnings_of(caplog)] == [
        "ColbertLoss: the Trainer's optimizer does not hold what the loss learns itself"
    ] * (not whole)


@through_compile
def test_a_compiled_loss(tmp_path):
    """The loss and not the model: it gains nothing, and is saved as ever."""
    eager = run(lambda model: ColbertLoss(model, temperature=0.1, learn_temperature=True), tmp_path / "eager")

    def compiled(model):
        return torch.compile(ColbertLoss(model, temperature=0.1, learn_temperature=True), backend="eager")

    weights, states = run(compiled, tmp_path / "compiled")
    assert_equal(eager[0], weights)
    assert_equal(eager[1], states)
    assert files(tmp_path / "compiled") == {"_st_colbert_losses.pt"}


def test_trials_are_alike(tmp_path):
    """``model_init``: each training of one Trainer has a new model, to which the loss begins anew."""
    moves = []

    class Follow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moves.append([p.detach().clone() for p in built[0].momentum_model.parameters()])

    built = []

    def build(model):
        built.append(queue(model, 9, 0.7))
        return built[-1]

    model = tiny_model()
    loss = build(model)
    weights = []
    for trial in range(2):
        torch.manual_seed(0)
        loss.model = tiny_model()
        weights.append(run(lambda _: loss, tmp_path / str(trial), model=loss.model, callbacks=[Follow()])[0])
    assert_equal(*weights)
    for first, second in zip(moves[:6], moves[6:], strict=True):
        assert_equal(dict(enumerate(first)), dict(enumerate(second)))
