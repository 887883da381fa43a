"""Optimizer steps: every loss hears of those that train its model, without a callback from the user."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from st_colbert_losses.encoding import unwrap


class Follower(Protocol):
    """What hears of optimizer steps: a loss with the model it trains."""

    model: nn.Module

    def after_step(self, moved: set[int]) -> None:
        """Called once per optimizer step of the model, with the momentum encoders that have moved already."""


# In the order they were made; with each the parameters of its model that have stepped since it was told.
_followers: dict[weakref.ref[Any], set[int]] = {}
_hook: list[Any] = []  # torch's handle, while anybody listens


def _forget(reference: weakref.ref[Any]) -> None:
    del _followers[reference]
    if not _followers:
        _hook.pop().remove()


def hear_of_steps(follower: Follower) -> None:
    """Tell a loss of every optimizer step that trains its model, for as long as it lives.

    Works for any optimizer, fused ones included; a step that a gradient scaler skips is none, and the steps of several
    optimizers that share out the parameters are one.
    """
    if not _followers:
        _hook.append(register_optimizer_step_post_hook(_after_step))
    _followers[weakref.ref(follower, _forget)] = set()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips inside its kernel
    if found_inf is not None and bool(found_inf):
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    moved: set[int] = set()
    for reference, stepped in list(_followers.items()):
        follower = reference()
        if follower is None:
            continue
        stepping = trained.intersection(map(id, unwrap(follower.model).parameters()))
        if stepping and (not stepped or stepped & stepping):  # else another optimizer's share of the last step
            stepped.clear()
            follower.after_step(moved)
        stepped |= stepping
