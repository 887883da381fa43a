"""What a training shows of itself beside the loss: signals, measured on the scores of each batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from st_colbert_losses.scores import Scores

MEASURED = (
    "in_batch_accuracy",
    "positive_score",
    "hardest_negative_score",
    "margin",
    "masked_share",
    "filtered_share",
)


@torch.no_grad()
def measure(scores: Scores, filtered: Scores) -> Tensor:
    """The signals of a batch, (6,) in the order of ``MEASURED``, without waiting for a GPU.

    Args:
        scores: The scores as they are.
        filtered: The scores as the objective sees them.
    """
    b, p = scores.pool.shape
    pool, positive = scores.pool.detach(), scores.positive.detach()
    negatives = torch.cat([pool, scores.hard.detach()], 1) if scores.hard.shape[1] else pool
    hardest = negatives.amax(1) if negatives.shape[1] else torch.full_like(positive, -torch.inf)
    has = hardest > -torch.inf
    n, margin = has.sum().clamp(min=1), positive - hardest
    nothing = positive.new_zeros(())
    changed = nothing
    if filtered is not scores:
        changed = (filtered.pool != pool).sum() + (filtered.hard != scores.hard).sum()
        changed = changed / (negatives > -torch.inf).sum().clamp(min=1)
    return torch.stack(
        [
            (margin > 0).logical_and_(has).sum() / n,
            positive.mean(),
            hardest.masked_fill(~has, 0).sum() / n,
            margin.masked_fill(~has, 0).sum() / n,
            1 - (pool > -torch.inf).sum() / (b * (p - 1)) if p > 1 else nothing,
            changed,
        ]
    )


class Signals:
    """The signals of the last batch, and their means since the last log. Read only when somebody asks."""

    def __init__(self) -> None:
        self.last: dict[str, float | Tensor] = {}
        self._sums: dict[str, float | Tensor] = {}
        self._batches = 0

    def update(self, measured: Tensor, others: Mapping[str, float | Tensor], *, log: bool) -> None:
        """Take those of a batch.

        Args:
            measured: What :func:`measure` returned.
            others: Further ones by name, numbers or detached scalars.
            log: Count them in the next log.
        """
        self.last = {"measured": measured, **others}
        if log:
            self._sums = {name: value + self._sums.get(name, 0) for name, value in self.last.items()}
            self._batches += 1

    def read(self) -> dict[str, float]:
        """Those of the last batch."""
        return _as_numbers(self.last, 1)

    def read_means(self) -> dict[str, float]:
        """The means over the batches since this was last called."""
        means = _as_numbers(self._sums, self._batches)
        self._sums, self._batches = {}, 0
        return means


def _as_numbers(sums: Mapping[str, float | Tensor], batches: int) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in sums.items():
        if name == "measured" and isinstance(value, Tensor):
            numbers.update(zip(MEASURED, (value / batches).tolist(), strict=True))
        else:
            numbers[name] = float(value) / batches
    return {name: float(f"{value:.6g}") for name, value in numbers.items()}
