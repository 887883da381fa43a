"""The momentum encoder: a second model that follows the trained one slowly.

``key = m * key + (1 - m) * live`` after each optimizer step, over the parameters that train.

References:
    He et al. (2020), Momentum Contrast, https://arxiv.org/abs/1911.05722
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

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
    """Refuse a momentum model that lacks a parameter of the model that trains, or has that very one.

    Raises:
        ValueError: Saying which.
    """
    theirs = dict(unwrap(twin).named_parameters())
    for name, p in unwrap(model).named_parameters():
        other = theirs.get(name)
        if p.requires_grad and other is p:
            raise ValueError(
                f"{owner}: got a momentum_model that shares the parameter {name!r}, which trains, with the model, "
                "expected a copy. Use copy.deepcopy(model), or leave momentum_model out."
            )
        if p.requires_grad and (other is None or other.shape != p.shape):
            raise ValueError(
                f"{owner}: got a momentum_model whose parameter {name!r} has shape "
                f"{None if other is None else other.shape}, expected {tuple(p.shape)} as in the model. Build it as "
                "the model was built; make the loss after adapters are added to the model."
            )


@torch.no_grad()
def follow(twin: nn.Module, model: nn.Module, momentum: float, precise: dict[str, Tensor]) -> None:
    """Move the momentum encoder towards the model by name: trained parameters by momentum, all else copied.

    Args:
        twin: The momentum encoder.
        model: The model.
        momentum: The share of the encoder that stays.
        precise: Float32 values of its half-precision parameters, where a hundredth of a step is lost in rounding;
            added here.
    """
    live = unwrap(model)
    parameters, buffers = dict(live.named_parameters()), dict(live.named_buffers())
    for name, p in twin.named_parameters():
        source = parameters.get(name)
        if source is None or source is p:
            continue
        if not source.requires_grad:
            p.copy_(source)
        elif p.dtype.itemsize < 4:
            precise[name] = precise.get(name, p).to(p.device, torch.float32).lerp_(source.float(), 1 - momentum)
            p.copy_(precise[name])
        else:
            precise.pop(name, None)
            p.lerp_(source.to(p), 1 - momentum)
    for name, b in twin.named_buffers():
        if name in buffers:
            b.copy_(buffers[name])


def settle(owner: str, twin: nn.Module, model: nn.Module) -> set[str]:
    """Make the momentum encoder fit the model as it is now: devices, dtypes, what trains; in evaluation mode.

    Returns:
        The names of the parameters that it shares with the model.

    Raises:
        ValueError: If the model trains a parameter that the encoder lacks.
    """
    twin.eval()
    copies: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, p in module._parameters.items():
            if p is not None and p.requires_grad:  # shared while it was frozen, and trained now
                copies.setdefault(id(p), nn.Parameter(p.detach().clone(), requires_grad=False))
                module._parameters[name] = copies[id(p)]
    check_twin(owner, model, twin)
    ours: dict[str, Tensor] = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    live = unwrap(model)
    for name, source in (*live.named_parameters(), *live.named_buffers()):
        tensor = ours.get(name)
        if tensor is not None and (tensor.device, tensor.dtype) != (source.device, source.dtype):
            tensor.data = tensor.data.to(source.device, source.dtype)
    return {name for name, source in live.named_parameters() if ours.get(name) is source}


def autocast_of(model: nn.Module) -> AbstractContextManager[Any]:
    """The autocast that accelerate put into the model's forward, for a copy that does not have it."""
    bare = unwrap(model)
    if "_original_forward" not in bare.__dict__:
        return nullcontext()
    from accelerate.state import AcceleratorState

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)
    device = next(bare.parameters()).device.type
    return nullcontext() if dtype is None else torch.autocast(device, dtype)
