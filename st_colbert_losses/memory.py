"""What a MoCo form remembers between steps: the queue and the momentum encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from st_colbert_losses.checks import check_memory
from st_colbert_losses.columns import Batch
from st_colbert_losses.distributed import gather_columns
from st_colbert_losses.momentum import autocast_of, check_twin, copy_model, follow, settle
from st_colbert_losses.options import MEMORY_DEFAULTS
from st_colbert_losses.queue import DocumentQueue
from st_colbert_losses.tokens import Tokens

# Those that are attributes of the loss; momentum_model is the memory's.
MEMORY_ATTRIBUTES = tuple(name for name in MEMORY_DEFAULTS if name != "momentum_model")


class MoCoLoss(Protocol):
    """What is asked of a MoCo form."""

    model: nn.Module
    queue_size: int
    queue_dtype: torch.dtype | None
    momentum: float | None
    enqueue_negatives: bool
    enqueue_batches: bool
    live_documents: bool

    def embed(self, model: nn.Module, columns: list[dict[str, Any]], first: int = 0) -> list[Tokens]:
        """Embed columns of the batch from one of them on."""


class Memory(nn.Module):
    """The state of a MoCo form: a module without parameters, whose extra state is in the loss's ``state_dict()``.

    The momentum encoder is kept out of the module tree, so that trainers neither train, wrap, swap nor publish it.

    Args:
        loss: The loss, with its model and hyperparameters. Not kept: copies of a loss have memories of their own.
        momentum_model: The momentum encoder, where it is not to be copied from the model.
    """

    momentum_model: nn.Module | None

    def __init__(self, loss: MoCoLoss, momentum_model: nn.Module | None) -> None:
        super().__init__()
        owner, model = type(loss).__name__, loss.model
        self.check_encoder(loss, loss.live_documents)
        if loss.momentum is None and momentum_model is not None:
            raise ValueError(
                f"{owner}: got a momentum_model with momentum=None, which is no second encoder, expected one of them. "
                "Give a momentum, or leave momentum_model out."
            )
        check_memory(owner, model, loss.momentum is not None)
        self.queue = DocumentQueue(loss.queue_size, loss.queue_dtype)
        twin = momentum_model
        if loss.momentum is None:
            twin = None
        elif twin is None:
            twin = copy_model(owner, model)
        else:
            check_twin(owner, model, twin)
            twin.requires_grad_(False)
        object.__setattr__(self, "momentum_model", twin)
        self._shared = set() if twin is None else settle(owner, twin, model)  # names of its parameters
        self._precise: dict[str, Tensor] = {}  # float32 values of its half-precision parameters

    def embed(self, loss: MoCoLoss, features: list[dict[str, Any]]) -> tuple[list[Tokens], list[Tokens]]:
        """Embed a training batch.

        Returns:
            The columns as they are scored; and the first document columns as they go into the queue, none if none do.
        """
        check_memory(type(loss).__name__, loss.model, self.momentum_model is not None)
        queued = 0 if not loss.enqueue_batches else len(features) - 1 if loss.enqueue_negatives else 1
        tokens = loss.embed(loss.model, features if loss.live_documents else features[:1])
        twin = self.momentum_model
        if twin is None:
            return tokens, tokens[1 : 1 + queued]
        self._shared = settle(type(loss).__name__, twin, loss.model)
        wanted = features[1 : 1 + queued] if loss.live_documents else features[1:]
        with torch.no_grad(), autocast_of(loss.model):
            fresh = loss.embed(twin, wanted, first=1)
        return (tokens if loss.live_documents else tokens + fresh), fresh[:queued]

    @torch.no_grad()
    def take(self, batch: Batch, fresh: list[Tokens]) -> None:
        """Put the first document columns of a batch into the queue, as they were embedded for it."""
        columns = [replace(c, tokens=t) for c, t in zip(batch.documents[: len(fresh)], fresh, strict=True)]
        for column in columns if batch.sizes is None else gather_columns(columns):
            self.queue.append(column)

    def after_step(self, loss: MoCoLoss, moved: set[int]) -> None:
        """Move the momentum encoder after an optimizer step, unless a loss that shares it has."""
        twin = self.momentum_model
        if twin is not None and loss.momentum is not None and id(twin) not in moved:
            moved.add(id(twin))
            self._shared = settle(type(loss).__name__, twin, loss.model)
            follow(twin, loss.model, loss.momentum, self._precise)

    def config(self, loss: MoCoLoss) -> dict[str, Any]:
        """The hyperparameters of a MoCo form; JSON-safe."""
        names = ("queue_size", "momentum", "enqueue_negatives", "enqueue_batches", "warmup_steps", "live_documents")
        dtype = None if loss.queue_dtype is None else str(loss.queue_dtype).removeprefix("torch.")
        return {**{name: getattr(loss, name) for name in names}, "queue_dtype": dtype}

    def check_fixed(self, loss: MoCoLoss, name: str, value: object) -> None:
        """Refuse to change what was made once.

        Raises:
            ValueError: Saying who, got, expected and the remedy.
        """
        encoder_changes = name == "momentum" and (value is None) != (loss.momentum is None)
        if name in ("queue_size", "queue_dtype") or encoder_changes:
            raise ValueError(
                f"{type(loss).__name__}: got {name}={value!r} after construction, expected it to stay "
                f"{getattr(loss, name)!r}: queue and momentum encoder are made once. Make a new loss."
            )
        if name == "live_documents":
            self.check_encoder(loss, bool(value))

    @staticmethod
    def check_encoder(loss: MoCoLoss, live_documents: bool) -> None:
        """Refuse to take documents from a momentum encoder that is not there.

        Raises:
            ValueError: Saying who, got, expected and the remedy.
        """
        if loss.momentum is None and not live_documents:
            raise ValueError(
                f"{type(loss).__name__}: got momentum=None with live_documents=False, expected a momentum encoder for "
                "the batch's documents. Give a momentum, or keep live_documents=True."
            )

    def get_extra_state(self) -> dict[str, Any]:
        """The queue, and what the momentum encoder does not share with the model."""
        twin = {} if self.momentum_model is None else self.momentum_model.state_dict()
        own = {name: self._precise.get(name, value) for name, value in twin.items() if name not in self._shared}
        return {"queue": self.queue.state(), "momentum_model": own}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.queue.load(state["queue"])
        if self.momentum_model is not None:
            twin = self.momentum_model.state_dict()
            self.momentum_model.load_state_dict({**twin, **state["momentum_model"]})
            self._precise = {
                name: value.clone()
                for name, value in state["momentum_model"].items()
                if value.dtype == torch.float32 and twin[name].dtype.itemsize < 4
            }

    def forget(self, model: nn.Module) -> None:
        """Start again from the model as it is: an empty queue, and a momentum encoder equal to it."""
        self.queue.clear()
        if self.momentum_model is not None:
            follow(self.momentum_model, model, 0.0, self._precise)
