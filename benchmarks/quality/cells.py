"""What is trained: every cell of every table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDS = (42, 43, 44)
RATES = (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4)
MEANS = (5e-4, 5e-3, 0.02, 0.1, 1.0)  # temperatures of mean scores
SUMS = (0.01, 0.1, 0.3, 1.0, 10.0)  # and of sums over some 15 query tokens, their libraries' default 1.0 among them
LEARNING_RATE = "learning_rate"


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Args:
        loss: Name of one of our losses or a peer's (``peers.py``); ``None`` for the model as it starts, ``BM25``, or
            ``dense``, the encoder that it is made from.
        batch_size: Rows of a batch.
        arguments: Of the loss.
        search: Arguments of the loss, and ``learning_rate``, with the values that are tried, one axis after the other:
            each on the dev split of the docstrings with the first seed, while the axes before stand at their best and
            those behind at `arguments`, or the middle of their values.
        like: The cell whose findings it takes instead.
        negatives: BM25 negatives of each row.
        teacher: Add a teacher's scores of each row's documents: MiniLM and BM25, half each.
        repeats: Train on so many copies of the first rows, as many rows in all.
        bf16: Train, and encode what is measured, under bfloat16 autocast, as the trainers do it: the encoder alone.
            Losses and rankings are in float32.
        seeds: It is run with.
    """

    loss: str | None
    batch_size: int = 16
    arguments: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    like: str | None = None
    negatives: int = 0
    teacher: bool = False
    repeats: int = 1
    bf16: bool = False
    seeds: tuple[int, ...] = SEEDS


def queue_cell(seeds: tuple[int, ...] = SEEDS, **arguments: Any) -> Cell:
    return Cell("MoCoColbertLoss", 16, {"queue_size": 512, **arguments}, like="batch 16", seeds=seeds)


def option_cell(loss: str = "ColbertLoss", **arguments: Any) -> Cell:
    return Cell(loss, 16, arguments, like="batch 16", seeds=SEEDS[:1])


def proof_cell(loss: str, temperatures: tuple[float, ...] = MEANS, **options: Any) -> Cell:
    return Cell(loss, bf16=True, search={"temperature": temperatures, LEARNING_RATE: RATES}, **options)


def variant(loss: str = "ColbertLoss", like: str = "ColbertLoss", **arguments: Any) -> Cell:
    return Cell(loss, 16, arguments, like=like, bf16=True)


DISTILLATION = "ColbertDistillationLoss"
FULL = 512 // 16  # steps until the queue is full
BASE = Cell("ColbertLoss", 16, search={LEARNING_RATE: RATES})
LARGE = {LEARNING_RATE: (1e-4, 2e-4, 4e-4, 8e-4)}
PYLATE_CACHED, ST_CACHED = "PyLate CachedContrastive, batch 128", "sentence-transformers cached InfoNCE, batch 128"
PYLATE, ST, COLPALI = "PyLate Contrastive", "sentence-transformers InfoNCE", "colpali-engine ColbertPairwiseCELoss"

QUEUE = {
    "untrained": Cell(None),
    "batch 16": BASE,
    "batch 128, cached": Cell("CachedColbertLoss", 128, {"mini_batch_size": 16}, search=LARGE),
    "queue 512": queue_cell(),
    "queue 512, warm-up": queue_cell(warmup_steps=FULL),
    "queue 512, momentum documents": queue_cell(live_documents=False),
    "queue 512, momentum documents, warm-up": queue_cell(live_documents=False, warmup_steps=FULL),
    "queue 512, momentum 0.9": queue_cell(SEEDS[:1], momentum=0.9),
    "queue 512, momentum 0.999": queue_cell(SEEDS[:1], momentum=0.999),
    "queue 512, no momentum encoder": queue_cell(SEEDS[:1], momentum=None),
}
OPTIONS = {
    "batch 16": BASE,
    "2 negatives": Cell("ColbertLoss", 16, like="batch 16", negatives=2),
    "distillation over 2 negatives": Cell(DISTILLATION, 16, like="batch 16", negatives=2, teacher=True),
    "distillation and InfoNCE, half each": Cell(
        DISTILLATION,
        16,
        {"contrastive_weight": 0.5},
        like="batch 16",
        negatives=2,
        teacher=True,
        seeds=SEEDS[:1],
    ),
    "1 of 2 negatives a step": Cell(
        "ColbertLoss", 16, {"negatives_per_step": 1}, like="batch 16", negatives=2, seeds=SEEDS[:1]
    ),
    "learned temperature": option_cell(learn_temperature=True),
    "filter, damped": option_cell(pos_aware_negative_filtering=True),
    "filter, masked": option_cell(pos_aware_negative_filtering=True, filter_mode="mask"),
    "both ways, half each": option_cell(document_to_query_weight=0.5),
    "matryoshka 128, 64": option_cell(matryoshka_dims=[128, 64]),
    "sigmoid, bias 0.5": option_cell("ColbertSigmoidLoss", bias=0.5),
    "sigmoid, bias 0.5, both learned": option_cell(
        "ColbertSigmoidLoss", bias=0.5, learn_bias=True, learn_temperature=True
    ),
}
PEERS = {
    "BM25": Cell("BM25", seeds=SEEDS[:1]),
    "dense start": Cell("dense", seeds=SEEDS[:1]),
    "ColBERT, untrained": Cell(None),
    "ColbertLoss": proof_cell("ColbertLoss"),
    "ColbertPairwiseCELoss": proof_cell("ColbertPairwiseCELoss"),
    "ColbertSigmoidLoss": Cell(
        "ColbertSigmoidLoss",
        arguments={"temperature": 0.02, "bias": 0.5},
        search={"bias": (0.0, 0.3, 0.4, 0.5, 0.6), "temperature": MEANS, LEARNING_RATE: RATES},
        bf16=True,
    ),
    "ColbertNegativeCELoss": proof_cell("ColbertNegativeCELoss", negatives=1),
    "ColbertPairwiseNegativeCELoss": proof_cell("ColbertPairwiseNegativeCELoss", negatives=1),
    "ColbertDistillationLoss": proof_cell(DISTILLATION, (0.3, 1.0, 3.0), negatives=2, teacher=True),
    "CachedColbertLoss, batch 128": Cell(
        "CachedColbertLoss", 128, {"mini_batch_size": 16}, search=LARGE, like="ColbertLoss", bf16=True
    ),
    "MoCoColbertLoss, queue 512": Cell("MoCoColbertLoss", 16, {"queue_size": 512}, like="ColbertLoss", bf16=True),
    PYLATE: proof_cell(PYLATE, SUMS),
    ST: Cell(ST, like=PYLATE, bf16=True),
    PYLATE_CACHED: Cell(PYLATE_CACHED, 128, search=LARGE, like=PYLATE, bf16=True),
    ST_CACHED: Cell(ST_CACHED, 128, search=LARGE, like=PYLATE, bf16=True),
    "ColbertLoss, on sums": variant(like=PYLATE, normalize_scores=False),
    COLPALI: proof_cell(COLPALI, SUMS),
    "ColbertPairwiseCELoss, on sums": Cell(
        "ColbertPairwiseCELoss", arguments={"normalize_scores": False}, like=COLPALI, bf16=True
    ),
}
ABLATIONS = {
    "ColbertLoss": PEERS["ColbertLoss"],
    "smooth maximum, tau 0.1": variant(use_smooth_max=True),
    "smooth maximum, tau 0.01": variant(use_smooth_max=True, tau=0.01),
    "filter, damping": variant(pos_aware_negative_filtering=True),
    "filter, masking": variant(pos_aware_negative_filtering=True, filter_mode="mask"),
    "batch 64": Cell("ColbertLoss", 64, like="CachedColbertLoss, batch 128", bf16=True),
    "CachedColbertLoss, batch 128": PEERS["CachedColbertLoss, batch 128"],
    "MoCoColbertLoss, queue 512": PEERS["MoCoColbertLoss, queue 512"],
    "repeated data, batch 64": Cell("ColbertLoss", 64, like="batch 64", repeats=8, bf16=True),
    "repeated data, batch 64, copies not masked": Cell(
        "ColbertLoss", 64, {"mask_duplicate_documents": False}, like="batch 64", repeats=8, bf16=True
    ),
    "ColbertPairwiseCELoss": PEERS["ColbertPairwiseCELoss"],
    "pairwise, its default, 1.0 on means": variant("ColbertPairwiseCELoss", "ColbertPairwiseCELoss", temperature=1.0),
}
TRANSFER = {  # of a temperature, to queries of another length
    "ColbertLoss": PEERS["ColbertLoss"],
    "ColbertLoss, temperature 0.03": variant(temperature=0.03),
    "ColbertLoss, temperature 0.04": variant(temperature=0.04),
    "ColbertLoss, on sums": PEERS["ColbertLoss, on sums"],
    "ColbertLoss, on sums, temperature 0.2": variant(like=PYLATE, normalize_scores=False, temperature=0.2),
}
TABLES: dict[str, dict[str, Cell]] = {
    "queue": QUEUE,
    "options": OPTIONS,
    "peers": PEERS,
    "ablations": ABLATIONS,
    "transfer": TRANSFER,
}
TASKS_OF = {"peers": ("stdlib", "wordnet"), "transfer": ("wordnet",)}  # of the others, the first alone
CELLS = {name: cell for table in TABLES.values() for name, cell in table.items()}
