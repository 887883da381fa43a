"""Distillation: a teacher's scores of a row's documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.checks import check_rows, check_teacher_scores, check_tokens
from st_colbert_losses.columns import Column
from st_colbert_losses.draws import draw_negatives
from st_colbert_losses.features import count_rows, row_bounds, select_rows
from st_colbert_losses.losses.infonce import CITATION as INFONCE_CITATION
from st_colbert_losses.objectives import distillation
from st_colbert_losses.options import CommonOptions, MoCoCommonOptions, split_options
from st_colbert_losses.tokens import Tokens

CITATION = """
@inproceedings{santhanam2022colbertv2,
    title = {{ColBERTv2}: Effective and Efficient Retrieval via Lightweight Late Interaction},
    author = {Santhanam, Keshav and Khattab, Omar and Saad-Falcon, Jon and Potts, Christopher and Zaharia, Matei},
    booktitle = {Proceedings of NAACL},
    year = {2022},
    url = {https://arxiv.org/abs/2112.01488},
}
"""


class ColbertDistillationLoss(LateInteractionLoss):
    """Distillation: the row's own documents are to be ranked as a teacher ranks them.

    ``loss of a row = KL(softmax(t / T_t) || softmax(s / T))``, t the teacher's scores of the row's N documents and s
    the model's; with ``contrastive_weight`` c it is ``(1 - c)`` times this and c times InfoNCE, at temperature T, over
    all documents of the batch.

    Args:
        model: The model to train.
        temperature: T, above 0, of the model's scores. 1.0 is what ColBERTv2, JaColBERT and PyLate's ``Distillation``
            take, on sums.
        teacher_temperature: T_t, above 0. Less makes the teacher's preferences sharper.
        normalize_teacher_scores: Move each row's teacher scores to [0, 1] first, the lowest to 0 and the highest to 1,
            so that a teacher's scale and offset do not matter.
        normalize_scores: Means of cosines in place of sums. Their range of 2 makes a softmax at T = 1 nearly flat, so
            lower the temperature with it: 1.0 on sums of 32 tokens is 0.031.
        contrastive_weight: c, in [0, 1]. Published recipes found little gain from it beside 32 documents a row.
        **options: See :class:`~st_colbert_losses.base.LateInteractionLoss`.

    References:
        Hinton et al. (2015), https://arxiv.org/abs/1503.02531; Santhanam et al. (2022), ColBERTv2,
        https://arxiv.org/abs/2112.01488; min-max: Clavié (2024), JaColBERTv2.5, https://arxiv.org/abs/2407.20750

    Inputs:
        ======  ==============================================  =======================================
        column  holds                                           labels
        ======  ==============================================  =======================================
        0       queries                                         (B, N) numbers: the teacher's score for
        1       positives, or all N documents of each row       each of the row's N documents, the
        2, ...  the row's other documents                       positive's first
        ======  ==============================================  =======================================

    Example:
        >>> import torch
        >>> from st_colbert_losses import ColbertDistillationLoss, Tokens
        >>> loss = ColbertDistillationLoss(torch.nn.Identity())
        >>> queries = Tokens(torch.tensor([[[1.0, 0.0]]]))
        >>> documents = [Tokens(torch.tensor([[[1.0, 0.0]]])), Tokens(torch.tensor([[[0.0, 1.0]]]))]
        >>> loss.from_tokens(queries, documents, labels=torch.tensor([[7.5, 3.0]])).item()  # scores 1, 0; teacher 1, 0
        0.0
    """

    flat_from = 0.5

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
        normalize_teacher_scores: bool = True,
        normalize_scores: bool = False,
        contrastive_weight: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            model,
            distillation,
            temperature=temperature,
            explicit_negatives=True,
            normalize_scores=normalize_scores,
            **options,
        )
        self.teacher_temperature = teacher_temperature
        self.normalize_teacher_scores = normalize_teacher_scores
        self.contrastive_weight = contrastive_weight

    def get_config_dict(self) -> dict[str, Any]:
        own = ("teacher_temperature", "normalize_teacher_scores", "contrastive_weight")
        return {**super().get_config_dict(), **{name: getattr(self, name) for name in own}}

    @property
    def citation(self) -> str:
        return super().citation + CITATION + INFONCE_CITATION

    def from_tokens(self, queries: Tokens, documents: Sequence[Tokens], labels: Tensor | None = None) -> Tensor:
        """Compute the same loss from embeddings; labels are the teacher's scores."""
        queries, *documents = check_tokens(self._name, queries, documents)
        if len(documents) == 1 and len(documents[0]) > len(queries) > 0:
            check_rows(self._name, [len(queries), len(queries), len(documents[0])])
            every = torch.arange(len(documents[0]), device=documents[0].mask.device).view(len(queries), -1)
            documents = [_rows(documents[0], every[:, 0]), _rows(documents[0], every[:, 1:].flatten())]
        return super().from_tokens(queries, documents, labels)

    def _arrange(
        self, features: list[dict[str, Any]], labels: Tensor | None, training: bool
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        rows = [count_rows(column) for column in features]
        if len(rows) == 2 and rows[1] > rows[0] > 0:  # PyLate's one column with all documents of a row
            b, n = rows
            check_rows(self._name, [b, b, n])
            bounds, every = row_bounds(features[1], n), torch.arange(n).view(b, -1)
            parts = (every[:, 0], every[:, 1:].flatten())
            features = [features[0], *(select_rows(features[1], bounds, part.tolist()) for part in parts)]
            rows = [b, b, n - b]
        if training and self.negatives_per_step is not None and len(features) > 2:
            check_rows(self._name, rows)
            teacher = check_teacher_scores(self._name, labels, rows[0], sum(rows[1:]) // rows[0])
            features, drawn = draw_negatives(features, self.negatives_per_step)
            if drawn is not None:
                labels = torch.cat([teacher[:, :1], teacher.gather(1, 1 + drawn.to(teacher.device))], 1)
        return features, labels

    def _roles(self, documents: list[Column]) -> tuple[list[Column], list[Column]]:
        # A copy of the positive has a teacher's score as any document has; nothing is left out for its content here.
        own = [replace(column, keys=None) for column in documents[1:]]
        if self.contrastive_weight > 0:
            return documents, own
        if self.memory is not None:
            self._notices.warn(
                "unused queue",
                "contrastive_weight=0 scores each row's own documents alone, so the queue is not used. Raise it, or "
                "use the form without queue.",
            )
        return [], own

    def _read_labels(self, labels: Tensor | None, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
        return None, check_teacher_scores(self._name, labels, rows[0], sum(rows[1:]) // rows[0])


def _rows(tokens: Tokens, index: Tensor) -> Tokens:
    return Tokens(tokens.vectors[index], tokens.mask[index])


class CachedColbertDistillationLoss(ColbertDistillationLoss):
    """:class:`ColbertDistillationLoss` with gradient caching: any batch size in the memory of a mini-batch.

    Same values and gradients; each step encodes twice.

    Args:
        model: The model to train.
        mini_batch_size: Rows that are encoded at once, from 1; a document counts as a row.
        mini_batch_num_tokens: Tokens that are encoded at once instead, rows times the longest row.
        show_progress_bar: Show one over the mini-batches of a column.
        **options: As for :class:`ColbertDistillationLoss`.

    References:
        Gao et al. (2021), https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
        normalize_teacher_scores: bool = True,
        normalize_scores: bool = False,
        contrastive_weight: float = 0.0,
        mini_batch_size: int | None = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            model,
            temperature=temperature,
            teacher_temperature=teacher_temperature,
            normalize_teacher_scores=normalize_teacher_scores,
            normalize_scores=normalize_scores,
            contrastive_weight=contrastive_weight,
            **options,
        )
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar


class MoCoColbertDistillationLoss(ColbertDistillationLoss):
    """:class:`ColbertDistillationLoss` with a queue: many negatives for its contrastive term at a small batch.

    Documents of earlier batches, as a slowly moving copy of the model encoded them, are further candidates of InfoNCE;
    take a ``contrastive_weight`` above 0.

    Args:
        model: The model to train.
        **options: As for :class:`ColbertDistillationLoss`, and :class:`~st_colbert_losses.options.MemoryOptions`.

    References:
        He et al. (2020), https://arxiv.org/abs/1911.05722; Wang et al. (2020), https://arxiv.org/abs/1912.06798
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
        normalize_teacher_scores: bool = True,
        normalize_scores: bool = False,
        contrastive_weight: float = 0.0,
        **options: Unpack[MoCoCommonOptions],
    ) -> None:
        common, memory = split_options(options)
        super().__init__(
            model,
            temperature=temperature,
            teacher_temperature=teacher_temperature,
            normalize_teacher_scores=normalize_teacher_scores,
            normalize_scores=normalize_scores,
            contrastive_weight=contrastive_weight,
            **common,
        )
        self._remember(memory)
