"""Hyperparameters of a loss that the trainer's optimizer may train with the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from st_colbert_losses.distributed import average_gradients

LOWEST_TEMPERATURE = 1e-4  # of a learned one


class Shifts(nn.ParameterDict):
    """What is learned, each as its shift from where it starts, so zero at first: where weight decay pulls it, too.

    A temperature moves by factors, ``T = start * exp(shift)``, all else by differences, ``start + shift``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[str, float] = {}

    def start(self, name: str, value: float) -> None:
        """Set a hyperparameter; a learned one goes on from there."""
        self.starts[name] = value
        if name in self:
            nn.init.zeros_(self[name])

    def learn(self, name: str) -> None:
        """Make a hyperparameter one that is learned."""
        self[name] = nn.Parameter(torch.zeros(()))

    def now(self, name: str) -> float:
        """The value of a hyperparameter."""
        if name not in self:
            return self.starts[name]
        return float(f"{self._shifted(name, self[name].detach()).item():.6g}")

    def forget(self) -> None:
        """Start again."""
        for name, value in self.starts.items():
            self.start(name, value)

    def values_for(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Those that are learned, for a step; their gradient is the mean over processes."""
        if not len(self):
            return {}
        with torch.no_grad():
            if "temperature" in self:
                self["temperature"].clamp_(min=math.log(LOWEST_TEMPERATURE / self.starts["temperature"]))
        shifts = average_gradients(torch.stack(list(self.parameters()))).to(dtype).unbind()
        names = [name for name, _ in self.named_parameters()]
        return {name: self._shifted(name, shift) for name, shift in zip(names, shifts, strict=True)}

    def _shifted(self, name: str, shift: Tensor) -> Tensor:
        start = self.starts[name]
        return start * shift.exp() if name == "temperature" else start + shift
