"""Retrieval quality of losses, batch sizes, queues and the peers: one short training a cell, one JSON a cell.

    make bench-quality                      # every table; cells that are there already are not run again
    make bench-quality ARGS="queue --jobs 2"

A cell trains a ColBERT from all-MiniLM-L6-v2 in sentence-transformers' own trainer for one epoch of 1,524 pairs
(documents of 64 tokens), with one thread in a process of its own, and is measured on the held-out test queries over
the whole corpus. Tasks: docstrings (of CPython 3.11), and WordNet's examples and glosses (`wordnet.py`). Time is CPU
time of the training; memory the peak of the process during the training beyond what it held before. Learning rates
and temperatures are searched on the dev split of the docstrings with the first seed (`cells.py`). Tables and plots go
into docs/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.quality.cells import CELLS, LEARNING_RATE, SEEDS, TABLES
from benchmarks.quality.report import write

RESULTS = Path("benchmarks/results/quality")


def path_of(name: str, task: str, split: str, seed: int, point: Mapping[str, float]) -> Path:
    words = [] if task == "stdlib" else [task]
    words += name.replace(",", "").split()
    if split == "dev":  # one file a point; on test there is one point
        words += ["dev", *(f"{'' if axis == LEARNING_RATE else axis}{value:g}" for axis, value in point.items())]
    return RESULTS / ("-".join([*words, f"seed{seed}"]) + ".json")


def ensure(name: str, task: str, split: str, seed: int, point: Mapping[str, float]) -> dict[str, Any]:
    """The result of a cell, run now in a process of its own where it is not there, or was run at another point."""
    path = path_of(name, task, split, seed, point)
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not done or any(done[axis] != value for axis, value in point.items()):
        job = json.dumps([name, task, split, seed, dict(point)])
        command = [sys.executable, "-m", "benchmarks.quality", "--job", job]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    print(f"  {path.stem:70} nDCG@10 {result['ndcg@10']:.4f}  {result.get('seconds', 0):5.0f} s", flush=True)
    return result


searching: dict[str, Lock] = {name: Lock() for name in CELLS}


def search(name: str) -> dict[str, float]:
    """The learning rate and the arguments of the loss that do best on dev, one axis after the other."""
    with searching[name]:
        return found_point(name)


@cache
def found_point(name: str) -> dict[str, float]:
    cell = CELLS[name]
    point = search(cell.like) if cell.like else {}
    if cell.loss in (None, "BM25", "dense"):
        return {}
    axes = {axis: values for axis, values in cell.search.items() if len(values) > 1}
    start = {axis: float(cell.arguments.get(axis, values[len(values) // 2])) for axis, values in axes.items()}
    point = {**point, **start}
    point |= {axis: float(value) for axis, value in cell.arguments.items() if axis == "temperature"}
    for axis, values in axes.items():
        tried = [ensure(name, "stdlib", "dev", SEEDS[0], {**point, axis: value}) for value in values]
        point[axis] = float(max(tried, key=lambda result: result["ndcg@10"])[axis])
    return point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        from benchmarks.quality.run import run

        job = json.loads(args.job)
        path = path_of(*job)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run(*job), indent=1) + "\n", encoding="utf-8")
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        for table in args.tables:
            cells = TABLES[table]
            points = dict(zip(cells, pool.map(search, cells), strict=True))
            jobs = [
                (name, task, "test", seed, points[name])
                for seed in args.seeds
                for task in (("stdlib", "wordnet") if table == "peers" and seed == SEEDS[0] else ("stdlib",))
                for name, cell in cells.items()
                if seed in cell.seeds
            ]
            results = list(pool.map(lambda job: ensure(*job), jobs))
            searched = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*-dev-*.json"))]
            write(table, cells, results, searched)


if __name__ == "__main__":
    main()
