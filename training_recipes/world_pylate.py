"""World P: PyLate's ColBERT, trained by sentence-transformers' trainer with PyLate's collator."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from pylate.evaluation import NanoBEIREvaluator
from pylate.evaluation import PyLateInformationRetrievalEvaluator as Evaluator
from pylate.models import ColBERT
from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
from sentence_transformers.evaluation import InformationRetrievalEvaluator as DenseEvaluator
from torch import nn

__all__ = [
    "DEV_NDCG",
    "USAGE",
    "DenseEvaluator",
    "Evaluator",
    "NanoBEIREvaluator",
    "TrainingArguments",
    "load_model",
    "make_trainer",
    "width_of",
]

DEV_NDCG = "eval_dev_MaxSim_ndcg@10"  # as the trainer calls it

USAGE = """\
from pylate import models, rank

model = models.ColBERT({path!r})
documents = ["Return the current working directory.", "Remove a file or an empty folder."]
print(rank.rerank(
    documents_ids=[[0, 1]],
    queries_embeddings=model.encode(["where am I?"], is_query=True),
    documents_embeddings=model.encode([documents], is_query=False),
))"""


def load_model(
    name: str, query_length: int | None, document_length: int | None, query_expansion: bool | None, **arguments: Any
) -> ColBERT:
    """Load a ColBERT model, or make one from an encoder by adding a random projection to 128 dimensions."""
    lengths = {"query_length": query_length, "document_length": document_length}
    return ColBERT(name, do_query_expansion=query_expansion, **lengths, **arguments)


def width_of(model: ColBERT) -> int:
    """Return the dimensions of its token embeddings."""
    return model.encode(["width"], is_query=True)[0].shape[-1]


def make_trainer(model: ColBERT, args: TrainingArguments, train: Dataset, loss: nn.Module, **options):
    """Return the trainer; PyLate's collator tokenizes the column named query as a query, all others as documents."""
    return SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=train,
        loss=loss,
        data_collator=ColBERTCollator(model.tokenize, prompts=args.prompts),
        **options,
    )
