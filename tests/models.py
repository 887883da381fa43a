"""Tiny models of both worlds, made here: no Hub, a few milliseconds a step."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertModel, BertTokenizerFast

PYLATE = importlib.util.find_spec("pylate") is not None
WORDS = (
    "red green blue one two three four five six seven eight nine ten cat dog bird fish sings eats sleeps what".split()
)


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
