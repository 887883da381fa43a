"""Training losses for late-interaction (multi-vector) retrievers: ColBERT for text, ColPali for page images."""

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.losses.distillation import (
    CachedColbertDistillationLoss,
    ColbertDistillationLoss,
    MoCoColbertDistillationLoss,
)
from st_colbert_losses.losses.infonce import CachedColbertLoss, ColbertLoss, MoCoColbertLoss
from st_colbert_losses.losses.negative_ce import (
    CachedColbertNegativeCELoss,
    ColbertNegativeCELoss,
    MoCoColbertNegativeCELoss,
)
from st_colbert_losses.losses.pairwise_ce import (
    CachedColbertPairwiseCELoss,
    ColbertPairwiseCELoss,
    MoCoColbertPairwiseCELoss,
)
from st_colbert_losses.losses.pairwise_negative_ce import (
    CachedColbertPairwiseNegativeCELoss,
    ColbertPairwiseNegativeCELoss,
    MoCoColbertPairwiseNegativeCELoss,
)
from st_colbert_losses.losses.sigmoid import CachedColbertSigmoidLoss, ColbertSigmoidLoss, MoCoColbertSigmoidLoss
from st_colbert_losses.scores import Scores
from st_colbert_losses.tokens import Tokens

__version__ = "0.1.0"

__all__ = [
    "CachedColbertDistillationLoss",
    "CachedColbertLoss",
    "CachedColbertNegativeCELoss",
    "CachedColbertPairwiseCELoss",
    "CachedColbertPairwiseNegativeCELoss",
    "CachedColbertSigmoidLoss",
    "ColbertDistillationLoss",
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertPairwiseCELoss",
    "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
    "LateInteractionLoss",
    "MoCoColbertDistillationLoss",
    "MoCoColbertLoss",
    "MoCoColbertNegativeCELoss",
    "MoCoColbertPairwiseCELoss",
    "MoCoColbertPairwiseNegativeCELoss",
    "MoCoColbertSigmoidLoss",
    "Scores",
    "Tokens",
]
