"""A plain module that learns, and ragged batches for it: what needs no library of models."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """A plain module: an embedding, a mixing layer over the attended tokens, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 6)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(6, 4)
        self.seen: list[torch.Tensor] = []

    def forward(self, features):
        mask = features["attention_mask"].bool()
        hidden = self.embedding(features["input_ids"])
        context = (hidden * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None].clamp(min=1)
        hidden = self.dropout(torch.tanh(hidden + context))
        self.seen.append(hidden.detach())  # not at the end: a replay stops once it has what backward needs
        vectors = nn.functional.normalize(self.linear(hidden), dim=-1)
        return {"token_embeddings": vectors, "attention_mask": mask}


def batch(rows: int = 7, columns: int = 3, width: int = 5) -> list[dict]:
    features = []
    for column in range(columns):
        lengths = torch.randint(1, width + 1, (rows,))
        features.append(
            {
                "input_ids": torch.randint(0, 50, (rows, width + column)),
                "attention_mask": (torch.arange(width + column) < lengths[:, None]).long(),
            }
        )
    return features
