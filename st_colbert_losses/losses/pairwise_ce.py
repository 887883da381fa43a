"""Pairwise: the hardest candidate against the positive."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.objectives import pairwise
from st_colbert_losses.options import MoCoOptions, Options, split_options

COLPALI_CITATION = """
@article{faysse2024colpali,
    title = {{ColPali}: Efficient Document Retrieval with Vision Language Models},
    author = {Faysse, Manuel and Sibille, Hugues and Wu, Tony and Omrani, Bilel and Viaud, Gautier and Hudelot,
              C{\\'e}line and Colombo, Pierre},
    journal = {arXiv preprint arXiv:2407.01449},
    year = {2024},
}
"""


class ColbertPairwiseCELoss(LateInteractionLoss):
    """Pairwise: a smooth hinge on the difference between the hardest candidate and the positive.

    ``loss of a row = softplus((max s - p) / T)``, p the positive's score, s those of its negatives; 0 without any.

    Args:
        model: The model to train.
        temperature: T, above 0. The loss acts on one difference near 0, where 1.0 keeps the gradient alive; on means
            of cosines the loss then stays near 0.5 (``softplus(-0.43) = 0.5``). ColPali and ColQwen2 were trained with
            1.0 on sums: ``normalize_scores=False``.
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        Faysse et al. (2024), ColPali, https://arxiv.org/abs/2407.01449

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
        >>> from st_colbert_losses import ColbertPairwiseCELoss, Tokens
        >>> loss = ColbertPairwiseCELoss(torch.nn.Identity())
        >>> queries = Tokens(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        >>> round(loss.from_tokens(queries, [queries]).item(), 4)  # softplus(0 - 1)
        0.3133
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, **options: Unpack[Options]) -> None:
        super().__init__(model, pairwise, temperature=temperature, **options)

    @property
    def citation(self) -> str:
        return super().citation + COLPALI_CITATION


class CachedColbertPairwiseCELoss(ColbertPairwiseCELoss):
    """:class:`ColbertPairwiseCELoss` with gradient caching: any batch size in the memory of a mini-batch.

    Same values and gradients; each step encodes twice.

    Args:
        model: The model to train.
        mini_batch_size: Rows that are encoded at once, from 1; the trainer's batch size sets the negatives.
        mini_batch_num_tokens: Tokens that are encoded at once instead, rows times the longest row.
        show_progress_bar: Show one over the mini-batches of a column.
        **options: As for :class:`ColbertPairwiseCELoss`.

    References:
        Gao et al. (2021), https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        mini_batch_size: int | None = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, temperature=temperature, **options)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar


class MoCoColbertPairwiseCELoss(ColbertPairwiseCELoss):
    """:class:`ColbertPairwiseCELoss` with a queue: many negatives at a small batch.

    Documents of earlier batches, as a slowly moving copy of the model encoded them, are further candidates.

    Args:
        model: The model to train.
        **options: As for :class:`ColbertPairwiseCELoss`, and :class:`~st_colbert_losses.options.MemoryOptions`.

    References:
        He et al. (2020), https://arxiv.org/abs/1911.05722; Wang et al. (2020), https://arxiv.org/abs/1912.06798
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, **options: Unpack[MoCoOptions]) -> None:
        common, memory = split_options(options)
        super().__init__(model, temperature=temperature, **common)
        self._remember(memory)
