"""Training losses for late-interaction (multi-vector) retrievers: ColBERT for text, ColPali for page images."""

from st_colbert_losses.base import LateInteractionLoss
from st_colbert_losses.losses.infonce import CachedColbertLoss, ColbertLoss
from st_colbert_losses.losses.negative_ce import CachedColbertNegativeCELoss, ColbertNegativeCELoss
from st_colbert_losses.losses.pairwise_ce import CachedColbertPairwiseCELoss, ColbertPairwiseCELoss
from st_colbert_losses.losses.pairwise_negative_ce import (
    CachedColbertPairwiseNegativeCELoss,
    ColbertPairwiseNegativeCELoss,
)
from st_colbert_losses.losses.sigmoid import CachedColbertSigmoidLoss, ColbertSigmoidLoss
from st_colbert_losses.scores import Scores
from st_colbert_losses.tokens import Tokens

__version__ = "0.1.0"

__all__ = [
    "CachedColbertLoss",
    "CachedColbertNegativeCELoss",
    "CachedColbertPairwiseCELoss",
    "CachedColbertPairwiseNegativeCELoss",
    "CachedColbertSigmoidLoss",
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertPairwiseCELoss",
    "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
    "LateInteractionLoss",
    "Scores",
    "Tokens",
]
