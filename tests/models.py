"""Tiny models of both worlds, made here: no Hub, a few milliseconds a step."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast

PYLATE = importlib.util.find_spec("pylate") is not None
TEXT = "red green blue one two three four five six seven eight nine ten cat dog bird fish sings eats sleeps what"
WORDS = TEXT.split()


def bert_folder(folder: Path, hidden: int = 16, layers: int = 2, dropout: float = 0.0) -> Path:
    """A random BERT with a word-level vocabulary, saved as transformers saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "?", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def tiny_model(*, dropout: float = 0.0, expansion: bool = True) -> nn.Module:
    """The ColBERT of the world that this environment is for: PyLate's, or sentence-transformers' own."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(bert_folder(Path(folder) / "bert", dropout=dropout))
        torch.manual_seed(1)
        if PYLATE:
            from pylate.models import ColBERT

            return ColBERT(
                path,
                embedding_size=8,
                query_length=8,
                document_length=16,
                do_query_expansion=expansion,
                device="cpu",
            )
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(path, device="cpu")


def columns(model: nn.Module, queries: list[str], *documents: list[str]) -> list[dict[str, Any]]:
    """Feature dicts of a batch, tokenised as this world's trainer does: column 0 the queries, then documents."""
    if PYLATE:
        texts = [(queries, True), *((column, False) for column in documents)]
        return [model.tokenize(column, is_query=is_query, pad=True) for column, is_query in texts]
    texts = [(queries, "query"), *((column, "document") for column in documents)]
    return [{**model.preprocess(column, task=task), "task": task} for column, task in texts]


def encoded(model: nn.Module, texts: list[str], *, is_query: bool) -> list[Tensor]:
    """The scored token embeddings of each text, (tokens, D) and unit length, as this world's own search gets them."""
    if PYLATE:
        return model.encode(texts, is_query=is_query, convert_to_numpy=False, show_progress_bar=False)
    encode = model.encode_query if is_query else model.encode_document
    return encode(texts, show_progress_bar=False)


def gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradient of a loss by parameter, as float64; parameters that take no part are left out."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    return {name: g.double() for (name, _), g in zip(named, grads, strict=True) if g is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare with the largest entry of all parameters as the unit; a loss without any gradient proves nothing.

    A parameter that takes no part may have no gradient or a gradient of zeros (a compiled model's).
    """
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    nothing = torch.zeros(())
    for name in actual.keys() | expected.keys():
        difference = float((actual.get(name, nothing) - expected.get(name, nothing)).abs().max()) / largest
        assert difference <= tolerance, f"{name}: {difference:.2e} of the largest gradient"
