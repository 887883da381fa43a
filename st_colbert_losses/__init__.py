"""Training losses for late-interaction (multi-vector) retrievers."""

from st_colbert_losses.tokens import Tokens

__all__ = ["Tokens"]
