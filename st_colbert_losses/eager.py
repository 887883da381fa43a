"""What ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """Leave a function out of ``torch.compile``."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call] # torch does not type it
