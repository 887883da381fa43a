"""What a training shows of itself beside the loss: signals, measured on the scores of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
        self._last: _Sums | None = None
        self._since_log: _Sums | None = None

    def update(self, measured: Tensor, others: Mapping[str, float | Tensor], *, log: bool) -> None:
        """Take those of a batch.

        Args:
            measured: What :func:`measure` returned.
            others: Further ones by name, numbers or detached scalars.
            log: Count them in the next log.
        """
        self._last = _Sums(measured, others, batches=1)
        if log:
            self._since_log = self._last if self._since_log is None else self._since_log.plus(self._last)

    def read(self) -> dict[str, float]:
        """Those of the last batch."""
        return {} if self._last is None else self._last.means()

    def read_means(self) -> dict[str, float]:
        """The means over the batches since this was last called."""
        means = {} if self._since_log is None else self._since_log.means()
        self._since_log = None
        return means


class _Sums(NamedTuple):
    """The signals of some batches: those of :func:`measure` in one tensor, to be fetched from a GPU at once."""

    measured: Tensor
    others: Mapping[str, float | Tensor]
    batches: int

    def plus(self, batch: _Sums) -> _Sums:
        others = {name: value + self.others.get(name, 0) for name, value in batch.others.items()}
        return _Sums(self.measured + batch.measured, others, self.batches + batch.batches)

    def means(self) -> dict[str, float]:
        numbers = dict(zip(MEASURED, (self.measured / self.batches).tolist(), strict=True))
        numbers |= {name: float(value) / self.batches for name, value in self.others.items()}
        return {name: float(f"{value:.6g}") for name, value in numbers.items()}
