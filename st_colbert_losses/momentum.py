"""The momentum encoder: a second model that follows the trained one slowly.

``key = m * key + (1 - m) * live`` after each optimizer step, over the parameters that train.

References:
    He et al. (2020), Momentum Contrast, https://arxiv.org/abs/1911.05722
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from st_colbert_losses.encoding import unwrap


def copy_model(owner: str, model: nn.Module) -> nn.Module:
    """Copy a model so that the copy never trains: what is frozen in the model is shared, the rest doubled.

    Raises:
        ValueError: If the model cannot be copied.
    """
    bare = unwrap(model)
    shared = [p for p in bare.parameters() if not p.requires_grad]
    card = getattr(bare, "model_card_data", None)  # holds datasets, and in some versions the trainer
    memo = {id(x): x for x in (*shared, card) if x is not None}
    try:
        twin: nn.Module = copy.deepcopy(bare, memo)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{owner}: got a model that cannot be copied ({error}), expected one for the momentum encoder. Pass your "
            "own copy, momentum_model=..., built as the model was and with its weights."
        ) from error
    for name in ("forward", "_original_forward"):  # accelerate's patch, bound to the original
        twin.__dict__.pop(name, None)
    return twin.requires_grad_(False).eval()


def check_twin(owner: str, model: nn.Module, twin: nn.Module) -> None:
    """Refuse a momentum model that lacks a parameter of the model that trains.

    Raises:
        ValueError: Saying which.
    """
    shapes = {name: p.shape for name, p in unwrap(twin).named_parameters()}
    for name, p in unwrap(model).named_parameters():
        if p.requires_grad and shapes.get(name) != p.shape:
            raise ValueError(
                f"{owner}: got a momentum_model whose parameter {name!r} has shape {shapes.get(name)}, expected "
                f"{tuple(p.shape)} as in the model. Build it as the model was built."
            )


@torch.no_grad()
def follow(twin: nn.Module, model: nn.Module, momentum: float) -> None:
    """Move the momentum encoder towards the model by name: trained parameters by momentum, all else copied."""
    live = unwrap(model)
    parameters, buffers = dict(live.named_parameters()), dict(live.named_buffers())
    for name, p in twin.named_parameters():
        source = parameters.get(name)
        if source is None or source is p:
            continue
        if source.requires_grad:
            p.lerp_(source.to(p), 1 - momentum)
        else:
            p.copy_(source)
    for name, b in twin.named_buffers():
        if name in buffers:
            b.copy_(buffers[name])


def settle(twin: nn.Module, model: nn.Module) -> None:
    """Put the momentum encoder where the model is, in its dtype, and in evaluation mode."""
    twin.eval()
    ours, theirs = next(twin.parameters(), None), next(unwrap(model).parameters(), None)
    if ours is not None and theirs is not None and (ours.device, ours.dtype) != (theirs.device, theirs.dtype):
        twin.to(device=theirs.device, dtype=theirs.dtype)


def autocast_of(model: nn.Module) -> AbstractContextManager[Any]:
    """The autocast that accelerate put into the model's forward, for a copy that does not have it."""
    bare = unwrap(model)
    if "_original_forward" not in bare.__dict__:
        return nullcontext()
    from accelerate.state import AcceleratorState

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)
    device = next(bare.parameters()).device.type
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


class Follower(Protocol):
    """What hears of optimizer steps: a loss with the model it trains."""

    model: nn.Module

    def after_step(self, moved: set[int]) -> None:
        """Called once per optimizer step of the model, with the momentum encoders that have moved already."""


_followers: list[weakref.ref[Any]] = []  # in the order they were made
_hook: list[Any] = []  # torch's handle, while anybody listens


def _forget(reference: weakref.ref[Any]) -> None:
    _followers.remove(reference)
    if not _followers:
        _hook.pop().remove()


def hear_of_steps(follower: Follower) -> None:
    """Tell a loss of every optimizer step that trains its model, for as long as it lives.

    Works for any optimizer, fused ones included; a step that a gradient scaler skips is none.
    """
    if not _followers:
        _hook.append(register_optimizer_step_post_hook(_after_step))
    _followers.append(weakref.ref(follower, _forget))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips inside its kernel
    if found_inf is not None and bool(found_inf):
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    moved: set[int] = set()
    for reference in list(_followers):
        follower = reference()
        if follower is not None and any(id(p) in trained for p in unwrap(follower.model).parameters()):
            follower.after_step(moved)
