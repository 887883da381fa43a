"""Carries the memory of a MoCo form through the Trainer's checkpoints, without a word from the user.

A Trainer saves the model and not the loss, and gives the loss no handle on itself. So at its first training forward a
loss looks up the call stack for the Trainer that is running it, adds a callback that writes its memory into every
checkpoint, and, if the Trainer resumed from one, reads it back.
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from st_colbert_losses.distributed import rank, world_size
from st_colbert_losses.memory import Memory

logger = logging.getLogger("st_colbert_losses")


def attach(loss: nn.Module, memory: Memory) -> None:
    """Attach a loss, and all others of the Trainer that is calling, to its checkpoints; restore them if it resumed.

    Args:
        loss: The loss that is being computed.
        memory: Its memory.
    """
    trainer, checkpoint = _find_trainer()
    if trainer is None:
        return
    losses = getattr(trainer, "loss", None)
    named: dict[str, Any] = dict(losses) if isinstance(losses, dict) else {"": losses}
    if not any(value is loss for value in named.values()):  # inside another loss
        named = {"": loss}
    for name, other in named.items():
        other_memory = getattr(other, "memory", None)
        if isinstance(other_memory, Memory) and not other_memory.attached:
            _attach(trainer, checkpoint, other, other_memory, name)


def _attach(trainer: Any, checkpoint: str | None, loss: nn.Module, memory: Memory, name: str) -> None:
    # A file per loss of a dict and per process; the underscore keeps the Trainer from publishing it.
    process = f"_rank{rank()}" if world_size() > 1 else ""
    file = f"_st_colbert_losses{'_' if name else ''}{name}{process}.pt"
    _add_callback(trainer, memory, file)
    if checkpoint is None:
        return
    if Path(checkpoint, file).is_file():
        device = next((p.device for p in loss.parameters()), None)
        memory.set_extra_state(torch.load(Path(checkpoint, file), map_location=device, weights_only=True))
        return
    logger.warning(
        "%s: resumed from %s, which has no %s, so the queue starts empty and the momentum encoder equal to the model.",
        type(loss).__name__,
        checkpoint,
        file,
    )
    memory.forget(loss.model)  # type: ignore[arg-type] # every loss has one


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


def _add_callback(trainer: Any, memory: Memory, file: str) -> None:
    from transformers import TrainerCallback

    class SaveMemory(TrainerCallback):
        """Writes the memory into every checkpoint, and has it look for a checkpoint at the next training."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(memory.get_extra_state(), folder / file)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            memory.attached = False
            trainer.remove_callback(self)

    memory.attached = True
    trainer.add_callback(SaveMemory())
