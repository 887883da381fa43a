"""InfoNCE: softmax over every candidate document."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.objectives import infonce
from st_colbert_losses.options import MoCoOptions, Options, split_options

CITATION = """
@article{oord2018representation,
    title = {Representation Learning with Contrastive Predictive Coding},
    author = {van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol},
    journal = {arXiv preprint arXiv:1807.03748},
    year = {2018},
}
"""


class ColbertLoss(LateInteractionLoss):
    """InfoNCE: the cross-entropy of each query's positive among all documents of the batch.

    ``loss of a row = logsumexp({p, s} / T) - p / T``, p the positive's score, s those of its negatives.

    Args:
        model: The model to train.
        temperature: T, above 0. 0.02 (colpali-engine) makes the softmax over means of cosines sharp: a margin of 0.1
            is a logit of 5. For a temperature of PyLate or sentence-transformers, divide by the query tokens:
            1.0 at 32 tokens is 0.031.
        document_to_query_weight: v, in [0, 1]: above 0 the loss is ``(1 - v)`` times the above and v times the same
            the other way round, the cross-entropy of each positive's query among the queries of the batch. 0.5 is
            CLIP's. Worth trying where documents are asked for by one query each, and batches are large.
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        van den Oord et al. (2018), Contrastive Predictive Coding, https://arxiv.org/abs/1807.03748; both ways: Radford
        et al. (2021), CLIP, https://arxiv.org/abs/2103.00020

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
        >>> from st_colbert_losses import ColbertLoss, Tokens
        >>> loss = ColbertLoss(torch.nn.Identity(), temperature=1.0)
        >>> queries = Tokens(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        >>> round(loss.from_tokens(queries, [queries]).item(), 4)  # log(1 + exp(0 - 1))
        0.3133
    """

    flat_from = 0.5

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        document_to_query_weight: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, infonce, temperature=temperature, **options)
        self.document_to_query_weight = document_to_query_weight

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "document_to_query_weight": self.document_to_query_weight}

    @property
    def citation(self) -> str:
        return super().citation + CITATION


class CachedColbertLoss(ColbertLoss):
    """:class:`ColbertLoss` with gradient caching: any batch size in the memory of a mini-batch.

    Same values and gradients; each step encodes twice.

    Args:
        model: The model to train.
        mini_batch_size: Rows that are encoded at once, from 1; the trainer's batch size sets the negatives.
        mini_batch_num_tokens: Tokens that are encoded at once instead, rows times the longest row.
        show_progress_bar: Show one over the mini-batches of a column.
        **options: As for :class:`ColbertLoss`.

    References:
        Gao et al. (2021), https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        document_to_query_weight: float = 0.0,
        mini_batch_size: int | None = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, temperature=temperature, document_to_query_weight=document_to_query_weight, **options)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar


class MoCoColbertLoss(ColbertLoss):
    """:class:`ColbertLoss` with a queue: many negatives at a small batch.

    Documents of earlier batches, as a slowly moving copy of the model encoded them, are further candidates.

    Args:
        model: The model to train.
        **options: As for :class:`ColbertLoss`, and :class:`~st_colbert_losses.options.MemoryOptions`.

    References:
        He et al. (2020), https://arxiv.org/abs/1911.05722; Wang et al. (2020), https://arxiv.org/abs/1912.06798
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.02,
        document_to_query_weight: float = 0.0,
        **options: Unpack[MoCoOptions],
    ) -> None:
        common, memory = split_options(options)
        super().__init__(model, temperature=temperature, document_to_query_weight=document_to_query_weight, **common)
        self._remember(memory)
