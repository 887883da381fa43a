"""A training that resumes from a Trainer's checkpoint goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

import io
import logging
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainerCallback

from st_colbert_losses import ColbertLoss, ColbertSigmoidLoss, MoCoColbertLoss, MoCoColbertSigmoidLoss
from tests.encoder import Encoder, batch
from tests.models import PYLATE, tiny_model
from tests.test_trainers import ROWS, Arguments, WorldTrainer

if PYLATE:
    from pylate.utils import ColBERTCollator

STEPS, SAVED = 6, 3
DATA = Dataset.from_dict({name: column * 4 for name, column in ROWS.items()})


def queue_and_encoder(model):
    return MoCoColbertLoss(model, queue_size=9, momentum=0.7, temperature=0.1)


def cached(model):
    return MoCoColbertSigmoidLoss(model, queue_size=9, momentum=0.7, live_documents=False, mini_batch_size=2)


def learned(model):
    """A temperature and a bias that the optimizer trains, and a filter that waits; no queue."""
    return ColbertSigmoidLoss(
        model,
        temperature=0.1,
        learn_temperature=True,
        learn_bias=True,
        pos_aware_negative_filtering=True,
        filter_warmup_steps=SAVED + 1,
    )


def two_losses(model):
    """One of two datasets; its losses share a momentum encoder, and may first run at any step."""
    first = queue_and_encoder(model)
    return {
        "one": first,
        "two": MoCoColbertSigmoidLoss(model, queue_size=5, momentum=0.7, momentum_model=first.momentum_model),
    }


def two_learned(model):
    return {name: ColbertLoss(model, temperature=0.1, learn_temperature=True) for name in ("user/one", "two")}


def run(
    build,
    folder: Path,
    *,
    resume: Path | None = None,
    accumulate: int = 1,
    model=None,
    callbacks=(),
    again=False,
    trainer=WorldTrainer,
):
    """Train to the last step, from the start or a checkpoint; the weights, and what the losses remember."""
    model = tiny_model(dropout=0.2) if model is None else model
    losses = build(model)
    arguments = Arguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        optim="adamw_torch_fused",
        save_strategy="steps",
        save_steps=SAVED,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer(
        model=model,
        args=arguments,
        train_dataset=DatasetDict(zip(losses, (DATA, DATA.select(range(12))), strict=True))
        if isinstance(losses, dict)
        else DATA,
        loss=losses,
        callbacks=list(callbacks),
        **({"data_collator": ColBERTCollator(model.tokenize)} if PYLATE else {}),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if again:
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    memories = losses if isinstance(losses, dict) else {"": losses}
    memories = {name: loss.own_state() for name, loss in memories.items() if loss.remembers}
    return {name: p.detach().clone() for name, p in model.named_parameters()}, memories


def assert_equal(first, second) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, tuple):
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    else:
        assert first == second


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("build", [queue_and_encoder, cached, learned, two_losses, two_learned])
def test_resume(build, accumulate, tmp_path):
    """From a checkpoint that was moved, with dropout and a fused optimizer."""
    whole = run(build, tmp_path / "whole", accumulate=accumulate)
    moved = tmp_path / "elsewhere" / f"checkpoint-{SAVED}"
    shutil.move(tmp_path / "whole" / f"checkpoint-{SAVED}", moved)
    assert_equal(whole, run(build, tmp_path / "resumed", resume=moved, accumulate=accumulate))
    assert all(memory["_extra_state"]["steps"] == STEPS for memory in whole[1].values())


@pytest.mark.parametrize("steps", [20, 27])
def test_a_queue_of_many_tokens_goes_on_as_it_was(steps):
    """More than one chunk of a backward pass holds, at two places of the ring: gradients are summed in one order."""
    torch.manual_seed(0)
    losses = [MoCoColbertLoss(Encoder(), queue_size=256, momentum=0.9, temperature=0.1) for _ in range(2)]
    for _ in range(steps):
        losses[0](batch(rows=16, columns=2, width=180))
    file = io.BytesIO()
    torch.save(losses[0].state_dict(), file)
    losses[1].load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for _ in range(18):
        features = batch(rows=16, columns=2, width=180)
        results = []
        for loss in losses:
            value = loss(features)
            results.append((value, *torch.autograd.grad(value, list(loss.model.parameters()))))
        assert_equal(*results)


def test_resume_without_the_file_says_so(tmp_path, caplog):
    whole = run(queue_and_encoder, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    (file,) = checkpoint.glob("_st_colbert_losses*")
    file.unlink()
    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        weights, memories = run(queue_and_encoder, tmp_path / "resumed", resume=checkpoint)
    assert "so it starts anew: with an empty queue, a momentum encoder equal to the model" in caplog.text
    assert memories[""]["_extra_state"]["steps"] == STEPS - SAVED
    assert any(not torch.equal(a, b) for a, b in zip(whole[0].values(), weights.values(), strict=True))


def test_a_second_training_goes_on_with_what_it_has(tmp_path):
    """Without a checkpoint nothing is restored, and each training writes its own."""
    model = tiny_model()
    loss = queue_and_encoder(model)
    for steps in (STEPS, 2 * STEPS):
        run(lambda _: loss, tmp_path / str(steps))
    assert len(list((tmp_path / str(STEPS) / f"checkpoint-{SAVED}").glob("_st_colbert_losses*"))) == 1
    assert len(list((tmp_path / str(2 * STEPS) / f"checkpoint-{SAVED}").glob("_st_colbert_losses*"))) == 1


def test_one_trainer_goes_back_to_its_checkpoint(tmp_path):
    assert_equal(run(queue_and_encoder, tmp_path / "once"), run(queue_and_encoder, tmp_path / "again", again=True))


class BreakOff(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


class Gradients(TrainerCallback):
    """How many of some losses have a gradient of their own at each optimizer step."""

    def __init__(self):
        self.losses, self.counts = {}, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        gradients = [loss.shifts["temperature"].grad for loss in self.losses.values()]
        self.counts.append(sum(gradient is not None for gradient in gradients))


def test_a_training_after_one_that_was_broken_off(tmp_path):
    """The same loss in a new Trainer is saved, and restored, as in the first."""
    model = tiny_model()
    loss = queue_and_encoder(model)
    with pytest.raises(KeyboardInterrupt):
        run(lambda _: loss, tmp_path / "broken", model=model, callbacks=[BreakOff()])
    run(lambda _: loss, tmp_path / "whole", model=model)
    (file,) = (tmp_path / "whole" / f"checkpoint-{SAVED}").glob("_st_colbert_losses*")
    assert torch.load(file)["_extra_state"]["steps"] == 1 + SAVED
    run(lambda _: loss, tmp_path / "resumed", model=model, resume=file.parent)
    assert loss.steps == 1 + STEPS


def test_what_is_learned_has_the_gradient_of_its_own_steps_alone(tmp_path):
    """Trainers zero the gradients of the model alone; a loss of a dict may not be asked for some steps."""
    seen = Gradients()

    def build(model):
        seen.losses = two_learned(model)
        return seen.losses

    run(build, tmp_path, callbacks=[seen])
    assert seen.counts == [1] * STEPS


def test_nothing_of_it_is_published(tmp_path):
    """The Trainer leaves out of its uploads what begins with an underscore; saved models hold nothing of the loss."""
    run(two_losses, tmp_path)
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    files = [path.name for path in checkpoint.iterdir()]
    ours = {"_st_colbert_losses_one.pt", "_st_colbert_losses_two.pt"}
    assert ours <= set(files)
    assert not ours & set(filter_repo_objects(files, ignore_patterns=["_*", "checkpoint-*"]))
    model = tiny_model()
    loss = queue_and_encoder(model)
    model.save_pretrained(str(tmp_path / "model"))
    assert not list((tmp_path / "model").rglob("*momentum*"))
    loss.momentum_model.save_pretrained(str(tmp_path / "momentum"))  # published in its place, in one line
    again = type(model)(str(tmp_path / "momentum"), device="cpu")
    for a, b in zip(again.parameters(), loss.momentum_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_losses_without_memory_write_nothing(tmp_path):
    run(lambda model: ColbertLoss(model), tmp_path)
    assert not list(tmp_path.rglob("_st_colbert_losses*"))
