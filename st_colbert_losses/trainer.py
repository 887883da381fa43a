"""What a loss does inside a Trainer, without a word from the user: its state in checkpoints, its signals in the log.

A Trainer saves the model and not the loss, and gives the loss no handle on itself. So in a training forward a loss
looks up the call stack for the Trainer that is running it and, where it meets it first, adds a callback, which writes
the loss's own state into every checkpoint and puts its signals beside the loss into every log. If the Trainer resumed
from a checkpoint, the state is read back at once.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote

import torch
from torch import nn

from st_colbert_losses.distributed import rank, world_size
from st_colbert_losses.eager import eager
from st_colbert_losses.signals import Signals

logger = logging.getLogger("st_colbert_losses")


class Attached(Protocol):
    """What is attached: a loss."""

    signals: Signals

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's and its own."""

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Those that are not the model's."""

    @property
    def remembers(self) -> bool:
        """Whether it has a state to save."""

    def own_state(self) -> dict[str, Any]:
        """All that is not the model's."""

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""

    def forget(self) -> None:
        """Start again from the model as it is."""


@eager
def attach(loss: Attached) -> None:
    """Attach a loss, and all others of the Trainer that is calling, to that Trainer; restore them if it resumed."""
    trainer, checkpoint = _find_trainer()
    if trainer is None or getattr(_callback_of(trainer, loss), "training", False):
        return
    losses = _losses_of(trainer)
    if not any(other is loss for other in losses.values()):  # one that the Trainer does not know
        losses = {_name_of_a_stranger(trainer): loss}
    for name, other in losses.items():
        _attach(trainer, checkpoint, other, name)
        _check_optimizer(trainer, other)


def _losses_of(trainer: Any) -> dict[str, Attached]:
    """The losses of a Trainer, by the names of their datasets and, of several in one module, their names in it."""
    given = getattr(trainer, "loss", None)
    found: dict[str, Attached] = {}
    for dataset, loss in given.items() if isinstance(given, dict) else [("", given)]:
        inside = dict(loss.named_modules()) if isinstance(loss, nn.Module) else {}
        inside = {path: module for path, module in inside.items() if hasattr(type(module), "own_state")}
        for path, module in inside.items():
            if not any(module is other for other in found.values()):  # else of two datasets
                found[".".join(filter(None, (dataset, path if len(inside) > 1 else "")))] = cast(Attached, module)
    return found


def _name_of_a_stranger(trainer: Any) -> str:
    attached = sum(hasattr(callback, "attached_loss") for callback in trainer.callback_handler.callbacks)
    return str(attached + 1) if attached else ""


def _attach(trainer: Any, checkpoint: str | None, loss: Attached, name: str) -> None:
    # A file per loss and process; the underscore keeps the Trainer from publishing it.
    process = f"_rank{rank()}" if world_size() > 1 else ""
    file = f"_st_colbert_losses{'_' if name else ''}{quote(name, safe='')}{process}.pt"
    callback = _callback_of(trainer, loss) or _add_callback(trainer, loss, file, f"{name}_" if name else "")
    callback.training = True
    file = callback.file  # of the first training, in which a stranger may have had another name
    if checkpoint is None or not loss.remembers or _restore(loss, Path(checkpoint, file)):
        return
    logger.warning(
        "%s: resumed from %s, which has no %s, so it starts anew: with an empty queue, a momentum encoder equal to "
        "the model, and what it learns itself at its first value.",
        type(loss).__name__,
        checkpoint,
        file,
    )
    loss.forget()


def _restore(loss: Attached, file: Path) -> bool:
    """Read a state back, if it is there.

    Raises:
        ValueError: If the file cannot be read.
    """
    if not file.is_file():
        return False
    device = next((p.device for p in loss.parameters()), None)
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # of a dozen types
        raise ValueError(
            f"{type(loss).__name__}: got {file}, which cannot be read ({error}), expected the state of the loss. "
            "Resume from another checkpoint, or remove the file: the loss then starts anew."
        ) from error
    loss.load_own_state(state)
    return True


def _check_optimizer(trainer: Any, loss: Attached) -> None:
    """Warn of parameters that the Trainer's optimizer does not hold."""
    groups = getattr(getattr(trainer, "optimizer", None), "param_groups", None)
    if not groups or trainer.is_deepspeed_enabled:  # which trains parameters of its own
        return
    held = {id(p) for group in groups for p in group["params"]}
    own = [id(p) for p in loss.own_parameters() if p.requires_grad]
    trained = {id(p) for p in loss.parameters() if p.requires_grad}.difference(own)
    if trained and not held.intersection(trained):
        logger.warning(
            "%s: the Trainer's optimizer holds no parameter of the model, so nothing trains. Was the loss made for "
            "another model object? Make it for the one that the Trainer has.",
            type(loss).__name__,
        )
    if not held.issuperset(own):
        logger.warning(
            "%s: the Trainer's optimizer does not hold what the loss learns itself. Make it with loss.parameters() in "
            "place of model.parameters().",
            type(loss).__name__,
        )


def _find_trainer() -> tuple[Any, str | None]:
    """The innermost Trainer on the call stack, and the checkpoint that it resumed from.

    Only the locals of ``Trainer.train`` are read: reading a frame's locals keeps them alive as long as the frame.
    """
    transformers = sys.modules.get("transformers")
    frame = None if transformers is None else inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "train" and "resume_from_checkpoint" in frame.f_code.co_varnames:
            found, resumed = frame.f_locals.get("self"), frame.f_locals.get("resume_from_checkpoint")
            if transformers is not None and isinstance(found, transformers.Trainer):
                return found, str(resumed) if isinstance(resumed, (str, Path)) else None
        frame = frame.f_back
    return None, None


def _callback_of(trainer: Any, loss: Attached) -> Any:
    """The callback of a loss in a Trainer that it met before."""
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if getattr(callback, "attached_loss", None) is loss), None)


def _add_callback(trainer: Any, loss: Attached, file: str, prefix: str) -> Any:
    from transformers import TrainerCallback

    class InTraining(TrainerCallback):
        """Writes the loss's own state into every checkpoint, and its signals into every log of the training."""

        attached_loss = loss
        training = False

        def __init__(self) -> None:
            self.file = file

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.training = False  # so that the loss looks for a checkpoint, also after a training that broke off

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for p in loss.own_parameters():  # a Trainer zeroes the gradients of the model alone
                p.grad = None

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not loss.remembers:
                return
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(loss.own_state(), folder / file)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.load_best_model_at_end and state.best_model_checkpoint and loss.remembers:
                _restore(loss, Path(state.best_model_checkpoint, file))  # as the model is

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not logs or "loss" not in logs:
                return
            signals = {prefix + name: value for name, value in loss.signals.read_means().items()}
            logs.update(signals)
            state.log_history[-1].update(signals)

    callback = InTraining()
    trainer.add_callback(callback)
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())  # before those that report the log
    return callback
