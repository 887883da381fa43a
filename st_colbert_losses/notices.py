"""What a loss tells its user in the log, each thing once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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

    def roles(self, roles: Sequence[str | None]) -> None:
        """Warn of columns that PyLate tokenised as what they are not."""
        if roles[0] == "document":
            self.warn(
                "role",
                "column 0 was tokenised as documents, but it holds the queries. PyLate goes by the column's name: "
                "rename it so that it contains 'query' or 'anchor'.",
            )
        elif "query" in roles[1:]:
            self.warn(
                "role",
                f"column {roles.index('query', 1)} was tokenised as queries, but it holds documents, which are then "
                "cut to the length of queries. Give the Trainer data_collator=ColBERTCollator(model.tokenize), and "
                "keep 'query' and 'anchor' out of the names of document columns.",
            )

    def mini_batch(self, mini_batch_size: int | None, rows: int) -> None:
        """Warn of mini-batches that are no smaller than the batch."""
        if mini_batch_size is not None and rows <= mini_batch_size:
            self.warn(
                "mini-batch",
                f"a mini-batch of {mini_batch_size} holds the whole batch of {rows} rows, so caching costs a second "
                "forward and saves little. Raise the trainer's per_device_train_batch_size, or lower mini_batch_size.",
            )

    def temperature(self, temperature: float, normalize_scores: bool, flat_from: float | None) -> None:
        """Warn of a temperature for means on sums, and of one for sums on means."""
        if not normalize_scores and temperature < 0.1:
            self.warn(
                "sums",
                f"temperature={temperature} divides sums over query tokens here, not means: very sharp. A temperature "
                "meant for means is to be multiplied by the number of query tokens.",
            )
        if normalize_scores and flat_from is not None and temperature >= flat_from:
            self.warn(
                "means",
                f"temperature={temperature} divides means over query tokens here, not sums: all documents look alike. "
                "Divide a temperature meant for sums by the number of query tokens, or use normalize_scores=False.",
            )

    def unused_filter(self, options: Sequence[str]) -> None:
        """Warn of options of a filter that is not turned on."""
        if options:
            self.warn(
                "filter",
                f"{', '.join(options)} without pos_aware_negative_filtering=True: nothing is filtered. Set it, or "
                "leave them out.",
            )

    def scores(self, scores: Scores, dtype: torch.dtype, tolerance: float | None, *, fills: bool = False) -> None:
        """Warn of batches without negatives, and of scores that only tokens of another length than 1 can have.

        Reading a result from a GPU waits for it, so there it happens at steps 1, 2, 4, 8 ... only.

        Args:
            scores: The scores of a batch.
            dtype: The dtype of the embeddings, whose rounding widens the tolerance.
            tolerance: How far a score may exceed 1; ``None`` for scores that have no bound.
            fills: Whether a queue will have negatives for a batch of one row.
        """
        self.looks += 1
        if not self._looks_at(scores.positive):
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
        rows, candidates = pool.shape
        if len(negatives) == 0 and rows == 1 and candidates and not fills:
            self.warn(
                "one row",
                "no query has a negative in the batch (it has one row), so the in-batch loss trains nothing there. "
                "Use more rows per batch; a last batch of one row does no harm.",
            )
        elif len(negatives) == 0 and rows > 1 and candidates:
            self.warn(
                "negatives",
                "no query has a negative in the batch (its rows are copies, share a label, or are empty), so the "
                "in-batch loss trains nothing. Shuffle the data; remove a 'label' column of another meaning.",
            )
        elif rows >= 8 and len(negatives) < rows * (candidates - 1) / 2:
            self.warn(
                "masked",
                f"{1 - len(negatives) / (rows * (candidates - 1)):.0%} of the candidates in a batch are no negatives: "
                "copies, or rows that share a label. Shuffle the data; remove a 'label' column of another meaning.",
            )
        if tolerance is not None:
            self._unit_length(
                torch.cat([scores.positive.detach(), negatives]), max(tolerance, 4 * torch.finfo(dtype).eps)
            )

    def row_losses(self, losses: Tensor) -> None:
        """Warn of an objective that makes no numbers of scores that are some."""
        if self._looks_at(losses) and not bool(losses.isfinite().all()):
            self.warn(
                "nan",
                "the objective returns NaN or infinity. Scores of what is no negative are minus infinity: leave them "
                "out, or take a softmax, a maximum or a clamp.",
            )

    def _looks_at(self, values: Tensor) -> bool:
        """Whether values may be read now: on a GPU at steps 1, 2, 4, 8 ..."""
        return values.device.type == "cpu" or not self.looks & (self.looks - 1)

    def _unit_length(self, scores: Tensor, tolerance: float) -> None:
        highest = scores.abs().max().item()
        if highest > 1 + tolerance:
            self.warn(
                "norm",
                f"a mean score of {highest:.4g} is beyond 1, so token embeddings are not unit length and the "
                "temperature does not mean what it says. Normalise them in the model (a MultiVectorEncoder needs a "
                "Normalize module), or use normalize_scores=False.",
            )
