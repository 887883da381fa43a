"""World M: sentence-transformers' own MultiVectorEncoder and its trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator as Evaluator,
)
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorNanoBEIREvaluator as NanoBEIREvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator as DenseEvaluator
from torch import nn
from transformers import ColModernVBertProcessor

__all__ = [
    "DEV_NDCG",
    "PAGE_USAGE",
    "USAGE",
    "DenseEvaluator",
    "Evaluator",
    "NanoBEIREvaluator",
    "TrainingArguments",
    "add_adapters",
    "load_model",
    "make_trainer",
    "merge_adapters",
    "width_of",
]

DEV_NDCG = "eval_dev_maxsim_ndcg@10"  # as the trainer calls it

USAGE = """\
from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder({path!r})
queries = model.encode_query(["where am I?"])
documents = model.encode_document(["Return the current working directory.", "Remove a file or an empty folder."])
print(model.similarity(queries, documents))"""

PAGE_USAGE = """\
from PIL import Image
from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder({path!r})
pages = [Image.new("RGB", (336, 448), colour) for colour in ("white", "gray")]  # or Image.open("page.png")
print(model.similarity(model.encode_query(["where am I?"]), model.encode_document(pages)))"""


@dataclass
class TrainingArguments(MultiVectorEncoderTrainingArguments):
    """Its own, with one type per flag, as a command line needs it."""

    max_length: int | None = field(default=None, metadata={"help": "tokens of every column, in training alone"})


class PagePromptingProcessor(ColModernVBertProcessor):
    """Writes the prompt around a page by itself, as the processors of ColPali and ColQwen2 do.

    Needed with transformers 5.24: its own returns pixels without tokens when called with images alone, which is how
    sentence-transformers 6.2 calls it, and the model then fails. A model that was trained needs this function too.
    """

    def __call__(self, images=None, text=None, **options):
        if images is not None and text is None:
            return self.process_images(images, **options)
        return super().__call__(images, text, **options)


def load_model(
    name: str, query_length: int | None, document_length: int | None, query_expansion: bool | None, **arguments: Any
) -> MultiVectorEncoder:
    """Load a multi-vector model, or make one from an encoder by adding a random projection to 128 dimensions."""
    model = MultiVectorEncoder(name, **arguments)
    if isinstance(model[0].processor, ColModernVBertProcessor):
        model[0].processor.__class__ = PagePromptingProcessor
    transformer = model[0]
    if document_length is not None:
        transformer.document_length = document_length
    if query_expansion is not None:
        fixed = {"strategy": "fixed", "attend": False, "length": query_length}
        transformer.query_expansion = fixed if query_expansion else None
    if query_length is not None and transformer.query_expansion is None:  # an expansion has a length of its own
        transformer.query_length = query_length
    return model


def width_of(model: MultiVectorEncoder) -> int:
    """Return the dimensions of its token embeddings."""
    return model.encode_query(["width"])[0].shape[-1]


def add_adapters(model: MultiVectorEncoder, arguments: dict[str, Any]) -> None:
    """Freeze the model and train LoRA adapters in it.

    Through peft itself: the model's own `add_adapter` asks for a version of it that is not published.
    """
    from peft import LoraConfig, get_peft_model

    model[0].model = get_peft_model(model[0].model, LoraConfig(**arguments))


def merge_adapters(model: MultiVectorEncoder) -> None:
    """Add the adapters to the weights that they adapt: a model like any other, to load without peft."""
    model[0].model = model[0].model.merge_and_unload()


class Trainer(MultiVectorEncoderTrainer):
    """Goes back to a checkpoint with adapters, which holds these and the modules that follow, not what they adapt."""

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        adapted = self.model[0].model
        if not hasattr(adapted, "peft_config"):
            super()._load_from_checkpoint(checkpoint_path)
            return
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(adapted, load_peft_weights(checkpoint_path, device=str(self.model.device)))
        saved = json.loads(Path(checkpoint_path, "modules.json").read_text(encoding="utf-8"))
        for module, entry in list(zip(self.model, saved, strict=True))[1:]:  # among them a ColBERT's projection
            module.load_state_dict(type(module).load(checkpoint_path, subfolder=entry["path"]).state_dict())


def make_trainer(model: MultiVectorEncoder, args: TrainingArguments, train: Dataset, loss: nn.Module, **options):
    """Return the trainer; its collator takes the first column as the query, all others as documents."""
    return Trainer(model=model, args=args, train_dataset=train, loss=loss, **options)
