"""Sigmoid: an independent decision for every pair of query and candidate."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.objectives import sigmoid
from st_colbert_losses.options import MoCoOptions, Options, split_options

CITATION = """
@inproceedings{zhai2023sigmoid,
    title = {Sigmoid Loss for Language Image Pre-Training},
    author = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
    booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision},
    year = {2023},
}
"""


class ColbertSigmoidLoss(LateInteractionLoss):
    """Sigmoid: every (query, candidate) pair is classified as a match or not, independently of the others.

    ``loss of a row = mean over the positive and its negatives of softplus(-y * (score - bias) / T)``, y = +1 for the
    positive, -1 for a negative.

    Args:
        model: The model to train.
        temperature: T, above 0.
        bias: The score at which a pair is undecided, in units of a score. With many negatives and scores far above 0,
            as an untrained ColBERT has, a bias near the mean score starts the loss balanced.
        learn_bias: Train the bias with the model: a parameter of the loss, as the difference to ``bias``. It moves by
            about the learning rate a step, so start near the right one.
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        Zhai et al. (2023), SigLIP, https://arxiv.org/abs/2303.15343

    Inputs:
        =======  ===============================================  ==========================
        column   holds                                            is a candidate of
        =======  ===============================================  ==========================
        0        queries                                          nothing
        1        positives                                        every query of the batch
        2, ...   negatives (optional)                             every query of the batch
        =======  ===============================================  ==========================

    Example:
        >>> import torch
        >>> from st_colbert_losses import ColbertSigmoidLoss, Tokens
        >>> loss = ColbertSigmoidLoss(torch.nn.Identity(), temperature=1.0, bias=0.5)
        >>> queries = Tokens(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        >>> round(loss.from_tokens(queries, [queries]).item(), 4)  # (softplus(-0.5) + softplus(-0.5)) / 2
        0.4741
    """

    flat_from = 0.5

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        bias: float = 0.0,
        learn_bias: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, sigmoid, temperature=temperature, **options)
        self.bias = bias
        self._learn("bias", learn_bias)

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "bias": self.bias, "learn_bias": self.learn_bias}

    @property
    def bias(self) -> float:
        """The score at which a pair is undecided; a learned one as it is now."""
        return self.shifts.now("bias")

    @bias.setter
    def bias(self, value: float) -> None:
        self.shifts.start("bias", value)

    @property
    def learn_bias(self) -> bool:
        """Whether the trainer's optimizer trains it."""
        return "bias" in self.shifts

    @property
    def citation(self) -> str:
        return super().citation + CITATION


class CachedColbertSigmoidLoss(ColbertSigmoidLoss):
    """:class:`ColbertSigmoidLoss` with gradient caching: any batch size in the memory of a mini-batch.

    Same values and gradients; each step encodes twice.

    Args:
        model: The model to train.
        mini_batch_size: Rows that are encoded at once, from 1; the trainer's batch size sets the negatives.
        mini_batch_num_tokens: Tokens that are encoded at once instead, rows times the longest row.
        show_progress_bar: Show one over the mini-batches of a column.
        **options: As for :class:`ColbertSigmoidLoss`.

    References:
        Gao et al. (2021), https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        bias: float = 0.0,
        learn_bias: bool = False,
        mini_batch_size: int | None = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, temperature=temperature, bias=bias, learn_bias=learn_bias, **options)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar


class MoCoColbertSigmoidLoss(ColbertSigmoidLoss):
    """:class:`ColbertSigmoidLoss` with a queue: many negatives at a small batch.

    Documents of earlier batches, as a slowly moving copy of the model encoded them, are further candidates.

    Args:
        model: The model to train.
        **options: As for :class:`ColbertSigmoidLoss`, and :class:`~st_colbert_losses.options.MemoryOptions`.

    References:
        He et al. (2020), https://arxiv.org/abs/1911.05722; Wang et al. (2020), https://arxiv.org/abs/1912.06798
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        bias: float = 0.0,
        learn_bias: bool = False,
        **options: Unpack[MoCoOptions],
    ) -> None:
        common, memory = split_options(options)
        super().__init__(model, temperature=temperature, bias=bias, learn_bias=learn_bias, **common)
        self._remember(memory)
