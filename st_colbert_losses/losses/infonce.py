"""InfoNCE: softmax over every candidate document."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.objectives import infonce
from st_colbert_losses.options import Options

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
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        van den Oord et al. (2018), Contrastive Predictive Coding, https://arxiv.org/abs/1807.03748

    Inputs:
        =======  ===============================================  ==========================
        column   holds                                            is a candidate of
        =======  ===============================================  ==========================
        0        queries                                          -
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

    def __init__(self, model: nn.Module, *, temperature: float = 0.02, **options: Unpack[Options]) -> None:
        super().__init__(model, infonce, temperature=temperature, **options)

    @property
    def citation(self) -> str:
        return super().citation + CITATION
