"""What a loss tells its user in the log, each thing once."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from st_colbert_losses.scores import Scores

logger = logging.getLogger("st_colbert_losses")


class Notices:
    """The things that one loss has said.

    Args:
        owner: The name of the loss.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.said: set[str] = set()
        self.looks = 0

    def warn(self, topic: str, message: str) -> None:
        """Warn, unless the topic was spoken of before."""
        self._once(logging.WARNING, topic, message)

    def info(self, topic: str, message: str) -> None:
        """Inform, unless the topic was spoken of before."""
        self._once(logging.INFO, topic, message)

    def _once(self, level: int, topic: str, message: str) -> None:
        if topic not in self.said:
            self.said.add(topic)
            logger.log(level, "%s: %s", self.owner, message)

    def mini_batch(self, mini_batch_size: int | None, rows: int) -> None:
        """Warn of mini-batches that are no smaller than the batch."""
        if mini_batch_size is not None and rows <= mini_batch_size:
            self.warn(
                "mini-batch",
                f"a mini-batch of {mini_batch_size} holds the whole batch of {rows} rows, so caching costs a second "
                "forward and saves little. Raise the trainer's per_device_train_batch_size, or lower mini_batch_size.",
            )

    def temperature(self, temperature: float, normalize_scores: bool) -> None:
        """Warn of a temperature for means on sums."""
        if not normalize_scores and temperature < 0.1:
            self.warn(
                "sums",
                f"temperature={temperature} divides sums over query tokens here, not means: very sharp. A temperature "
                "meant for means is to be multiplied by the number of query tokens.",
            )

    def scores(self, scores: Scores, dtype: torch.dtype, tolerance: float | None) -> None:
        """Warn of batches without negatives, and of scores that only tokens of another length than 1 can have.

        Reading a result from a GPU waits for it, so there it happens at steps 1, 2, 4, 8 ... only.

        Args:
            scores: The scores of a batch.
            dtype: The dtype of the embeddings, whose rounding widens the tolerance.
            tolerance: How far a score may exceed 1; ``None`` for scores that have no bound.
        """
        self.looks += 1
        if scores.positive.device.type != "cpu" and self.looks & (self.looks - 1):
            return
        pool = scores.pool.detach()
        negatives = pool[pool != -torch.inf]
        if not (bool(scores.positive.isfinite().all()) and bool(negatives.isfinite().all())):
            self.warn(
                "nan",
                "scores are NaN or infinite, so token embeddings are. Look at the learning rate and at "
                "max_grad_norm, or use bf16 in place of fp16.",
            )
            return
        if len(negatives) == 0 and pool.shape[1]:  # a loss without an in-batch term scores no pool
            reason = "it has one row" if len(pool) == 1 else "its rows are copies, share a label, or are empty"
            self.warn(
                "negatives",
                f"no query has a negative in the batch ({reason}), so the in-batch loss trains nothing. Use more rows "
                "per batch, and shuffle the data.",
            )
        if tolerance is not None:
            self._unit_length(
                torch.cat([scores.positive.detach(), negatives]), max(tolerance, 4 * torch.finfo(dtype).eps)
            )

    def _unit_length(self, scores: Tensor, tolerance: float) -> None:
        highest = scores.abs().max().item()
        if highest > 1 + tolerance:
            self.warn(
                "norm",
                f"a mean score of {highest:.4g} is beyond 1, so token embeddings are not unit length and the "
                "temperature does not mean what it says. Normalise them in the model (a MultiVectorEncoder needs a "
                "Normalize module), or use normalize_scores=False.",
            )
