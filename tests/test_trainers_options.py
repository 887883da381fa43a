"""Distillation, drawn negatives, learned scales and the signals in the log, in the real trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from transformers import TrainerCallback

from st_colbert_losses import (
    CachedColbertDistillationLoss,
    CachedColbertLoss,
    ColbertDistillationLoss,
    ColbertLoss,
    ColbertSigmoidLoss,
    MoCoColbertLoss,
)
from st_colbert_losses.signals import MEASURED
from tests.models import PYLATE, assert_same_gradients, tiny_model
from tests.test_trainers import ROWS, train, trainer_for, updates

DATA = Dataset.from_dict(ROWS)
TEACHER = [[3.0, 1.0], [5.0, 6.0], [2.0, 0.0], [1.0, 0.5], [4.0, 1.0], [0.0, 7.0]]
SCORED = Dataset.from_dict({**ROWS, "label": TEACHER})


@pytest.mark.parametrize("cls", [ColbertDistillationLoss, CachedColbertDistillationLoss])
def test_distillation(cls, tmp_path: Path) -> None:
    """Scores of a column 'label' arrive, and the loss falls."""
    model = tiny_model()
    loss = cls(model, temperature=0.5)
    losses = train(model, loss, tmp_path, SCORED, max_steps=20, learning_rate=1e-2)
    assert losses[-1] < 0.5 * losses[0]


if PYLATE:

    def test_pylates_column_of_lists(tmp_path: Path) -> None:
        """All documents of a row in one column, its scores in 'scores': the same updates as in columns apart."""
        lists = [list(row) for row in zip(ROWS["positive"], ROWS["negative"], strict=True)]
        flattened = Dataset.from_dict({"query": ROWS["query"], "documents": lists, "scores": TEACHER})
        apart = updates(lambda model: ColbertDistillationLoss(model), tmp_path, SCORED)
        together = updates(lambda model: ColbertDistillationLoss(model), tmp_path, flattened)
        assert_same_gradients(together, apart, 1e-5)  # float32, other groups of rows


class Reporter(TrainerCallback):
    """What a reporter, such as TensorBoard's, is given."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.logs.append(dict(logs))


def test_signals_in_the_log(tmp_path: Path) -> None:
    """In training logs, for reporters and in the history, as means over the steps since the last; not in others."""
    model = tiny_model()
    loss = MoCoColbertLoss(model, temperature=0.1, queue_size=8)
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_for(model, loss, tmp_path, DATA, DATA, max_steps=4, **evaluation)
    trainer.args.logging_steps = trainer.state.logging_steps = 2
    reporter = Reporter()
    trainer.add_callback(reporter)
    seen = []
    after_step = loss.after_step

    def watch(moved):
        seen.append(loss.metrics)
        after_step(moved)

    loss.after_step = watch
    trainer.train()
    names = {*MEASURED, "temperature", "queue_fill", "queue_age"}
    for logs in (reporter.logs, trainer.state.log_history):
        training = [entry for entry in logs if "loss" in entry]
        assert len(training) == 2
        for entry, steps in zip(training, (seen[:2], seen[2:]), strict=True):
            for name in names:
                assert entry[name] == pytest.approx((steps[0][name] + steps[1][name]) / 2, rel=1e-4, abs=1e-6)
        assert not any(names & entry.keys() for entry in logs if "loss" not in entry)
    json.dumps(trainer.state.log_history)


def test_signals_of_a_dict_of_losses_bear_its_names(tmp_path: Path) -> None:
    model = tiny_model()
    losses = {"one": ColbertLoss(model), "two": CachedColbertLoss(model, mini_batch_size=2)}
    trainer = trainer_for(
        model,
        losses,
        tmp_path,
        DatasetDict(one=DATA, two=Dataset.from_dict(ROWS)),
        num_train_epochs=1,
        max_steps=-1,
        per_device_train_batch_size=2,
    )
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {"one_margin", "two_margin"} <= logged
    assert "margin" not in logged


def test_a_second_training_logs_once(tmp_path: Path) -> None:
    model = tiny_model()
    trainer = trainer_for(model, ColbertLoss(model), tmp_path, DATA, max_steps=2)
    trainer.train()
    before = len(trainer.callback_handler.callbacks)
    trainer.train()
    assert len(trainer.callback_handler.callbacks) == before
    assert sum("margin" in entry for entry in trainer.state.log_history) == 2


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_learned_scales_are_trained(optim: str, tmp_path: Path) -> None:
    """By the trainer's optimizer, each step with its own gradient: steps of one size with one batch and SGD."""
    model = tiny_model()
    model.requires_grad_(False)
    next(p for name, p in model.named_parameters() if "word_embeddings" in name).requires_grad_(True)
    loss = ColbertSigmoidLoss(model, temperature=0.2, learn_temperature=True, learn_bias=True)
    trainer = trainer_for(model, loss, tmp_path, DATA, max_steps=3, learning_rate=1e-4, optim=optim, max_grad_norm=0.0)
    trainer.train()
    logged = [entry["bias"] for entry in trainer.state.log_history if "loss" in entry]
    steps = [b - a for a, b in zip(logged, [*logged[1:], loss.bias], strict=True)]
    assert steps[0] > 0
    assert steps == pytest.approx([steps[0]] * 3, rel=0.05)  # a gradient that piled up would make them 1, 2, 3
    assert loss.temperature != 0.2


def test_drawn_negatives(tmp_path: Path) -> None:
    """One of two a step; the evaluation has both."""
    rows = {**ROWS, "negative_1": ROWS["negative"][::-1]}
    model = tiny_model()
    loss = ColbertLoss(model, temperature=0.1, negatives_per_step=1)
    widths = []
    read = loss._read_labels

    def watch(labels, columns):
        widths.append(columns)
        return read(labels, columns)

    loss._read_labels = watch
    data = Dataset.from_dict(rows)
    train(model, loss, tmp_path, data, evaluation=data, max_steps=2, eval_strategy="epoch")
    assert widths[0] == [6, 6, 6]
    assert widths[-1] == [6, 6, 6, 6]
