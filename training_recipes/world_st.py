"""World M: sentence-transformers' own MultiVectorEncoder and its trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator as DenseEvaluator
from torch import nn

__all__ = ["USAGE", "DenseEvaluator", "Evaluator", "TrainingArguments", "load_model", "make_trainer"]

Evaluator = MultiVectorInformationRetrievalEvaluator

USAGE = """\
from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder({path!r})
queries = model.encode_query(["where am I?"])
documents = model.encode_document(["Return the current working directory.", "Remove a file or an empty folder."])
print(model.similarity(queries, documents))"""


@dataclass
class TrainingArguments(MultiVectorEncoderTrainingArguments):
    """Its own, with one type per flag, as a command line needs it."""

    max_length: int | None = field(default=None, metadata={"help": "tokens of every column, in training alone"})


def load_model(
    name: str, query_length: int, document_length: int, query_expansion: bool | None, **arguments: Any
) -> MultiVectorEncoder:
    """Load a multi-vector model, or make one from an encoder by adding a random projection to 128 dimensions."""
    model = MultiVectorEncoder(name, **arguments)
    transformer = model[0]
    transformer.document_length = document_length
    if query_expansion is not None:
        fixed = {"strategy": "fixed", "attend": False, "length": query_length}
        transformer.query_expansion = fixed if query_expansion else None
    if transformer.query_expansion is None:  # an expansion has a length of its own
        transformer.query_length = query_length
    return model


def make_trainer(model: MultiVectorEncoder, args: TrainingArguments, train: Dataset, loss: nn.Module, **options):
    """Return the trainer; its collator takes the first column as the query, all others as documents."""
    return MultiVectorEncoderTrainer(model=model, args=args, train_dataset=train, loss=loss, **options)
