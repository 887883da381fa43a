"""InfoNCE blended with a term on the row's explicit negatives."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.losses.infonce import CITATION
from st_colbert_losses.losses.pairwise_ce import COLPALI_CITATION
from st_colbert_losses.objectives import explicit_and_infonce
from st_colbert_losses.options import MoCoOptions, Options, split_options


class ColbertNegativeCELoss(LateInteractionLoss):
    """InfoNCE over the batch's positives, blended with a smooth hinge on each explicit negative.

    ``loss of a row = (1 - w) * mean softplus((h - p) / T) + w * (logsumexp({p, s} / T) - p / T)``, p the positive's
    score, h those of the row's explicit negatives, s those of the other rows' positives.

    Args:
        model: The model to train.
        temperature: T, above 0, of both terms.
        in_batch_term_weight: w, in [0, 1].
        document_to_query_weight: As of :class:`ColbertLoss`, within the term on the batch.
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        colpali-engine (``ColbertNegativeCELoss``), after Faysse et al. (2024), https://arxiv.org/abs/2407.01449

    Inputs:
        =======  ===============================================  ==========================
        column   holds                                            is a candidate of
        =======  ===============================================  ==========================
        0        queries                                          nothing
        1        positives                                        every query of the batch
        2, ...   negatives (at least one column)                  their own row
        =======  ===============================================  ==========================

    Example:
        >>> import torch
        >>> from st_colbert_losses import ColbertNegativeCELoss, Tokens
        >>> loss = ColbertNegativeCELoss(torch.nn.Identity(), temperature=1.0)
        >>> queries = Tokens(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        >>> opposites = Tokens(-queries.vectors)
        >>> round(loss.from_tokens(queries, [queries, opposites]).item(), 4)  # (softplus(-2) + softplus(-1)) / 2
        0.2201
    """

    flat_from = 0.5

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        in_batch_term_weight: float = 0.5,
        document_to_query_weight: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, explicit_and_infonce, temperature=temperature, explicit_negatives=True, **options)
        self.in_batch_term_weight = in_batch_term_weight
        self.document_to_query_weight = document_to_query_weight

    def get_config_dict(self) -> dict[str, Any]:
        own = ("in_batch_term_weight", "document_to_query_weight")
        return {**super().get_config_dict(), **{name: getattr(self, name) for name in own}}

    @property
    def citation(self) -> str:
        return super().citation + CITATION + COLPALI_CITATION


class CachedColbertNegativeCELoss(ColbertNegativeCELoss):
    """:class:`ColbertNegativeCELoss` with gradient caching: any batch size in the memory of a mini-batch.

    Same values and gradients; each step encodes twice.

    Args:
        model: The model to train.
        mini_batch_size: Rows that are encoded at once, from 1; the trainer's batch size sets the negatives.
        mini_batch_num_tokens: Tokens that are encoded at once instead, rows times the longest row.
        show_progress_bar: Show one over the mini-batches of a column.
        **options: As for :class:`ColbertNegativeCELoss`.

    References:
        Gao et al. (2021), https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        in_batch_term_weight: float = 0.5,
        document_to_query_weight: float = 0.0,
        mini_batch_size: int | None = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            model,
            temperature=temperature,
            in_batch_term_weight=in_batch_term_weight,
            document_to_query_weight=document_to_query_weight,
            **options,
        )
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar


class MoCoColbertNegativeCELoss(ColbertNegativeCELoss):
    """:class:`ColbertNegativeCELoss` with a queue: many negatives at a small batch.

    Documents of earlier batches, as a slowly moving copy of the model encoded them, are further candidates.

    Args:
        model: The model to train.
        **options: As for :class:`ColbertNegativeCELoss`, and :class:`~st_colbert_losses.options.MemoryOptions`.

    References:
        He et al. (2020), https://arxiv.org/abs/1911.05722; Wang et al. (2020), https://arxiv.org/abs/1912.06798
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        in_batch_term_weight: float = 0.5,
        document_to_query_weight: float = 0.0,
        **options: Unpack[MoCoOptions],
    ) -> None:
        common, memory = split_options(options)
        super().__init__(
            model,
            temperature=temperature,
            in_batch_term_weight=in_batch_term_weight,
            document_to_query_weight=document_to_query_weight,
            **common,
        )
        self._remember(memory)
