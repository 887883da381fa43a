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
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.quality.cells import CELLS, LEARNING_RATE, SEEDS, TABLES, TASKS_OF
from benchmarks.quality.report import write
from benchmarks.quality.run import quiet, run

RESULTS = Path("benchmarks/results/quality")
Point = Mapping[str, float]  # arguments of the loss, and the learning rate


def path_of(name: str, task: str, split: str, seed: int, point: Point) -> Path:
    words = [] if task == "stdlib" else [task]
    words += name.replace(",", "").split()
    if split == "dev":  # one file a point; on test there is one point
        words += ["dev", *(f"{'' if axis == LEARNING_RATE else axis}{value:g}" for axis, value in point.items())]
    return RESULTS / ("-".join([*words, f"seed{seed}"]) + ".json")


class Runs:
    """Runs cells, `jobs` at a time, each in another process, unless its result is there."""

    def __init__(self, jobs: int) -> None:
        spawn = get_context("spawn")
        self.searching = ProcessPoolExecutor(jobs, spawn, quiet)
        self.measuring = ProcessPoolExecutor(jobs, spawn, quiet, max_tasks_per_child=1)  # a fresh one has clean memory
        self.points: dict[str, dict[str, float]] = {}
        self.locks = {name: Lock() for name in CELLS}

    def close(self) -> None:
        self.searching.shutdown()
        self.measuring.shutdown()

    def result(self, name: str, task: str, split: str, seed: int, point: Point) -> dict[str, Any]:
        """The result of a cell at a point."""
        path = path_of(name, task, split, seed, point)
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not done or any(done[axis] != value for axis, value in point.items()):
            pool = self.searching if split == "dev" else self.measuring
            done = pool.submit(run, name, task, split, seed, point).result()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"  {path.stem:70} nDCG@10 {done['ndcg@10']:.4f}  {done.get('seconds', 0):5.0f} s", flush=True)
        return done

    def point(self, name: str) -> dict[str, float]:
        """The arguments of the loss and the learning rate that do best on dev, one axis after the other."""
        with self.locks[name]:
            if name not in self.points:
                self.points[name] = self.search(name)
        return self.points[name]

    def search(self, name: str) -> dict[str, float]:
        cell = CELLS[name]
        point = dict(self.point(cell.like)) if cell.like else {}
        for axis, values in cell.search.items():
            point[axis] = cell.arguments.get(axis, values[len(values) // 2])
        point |= {axis: value for axis, value in cell.arguments.items() if axis in point}
        for axis, values in cell.search.items():
            tried = [self.result(name, "stdlib", "dev", SEEDS[0], {**point, axis: value}) for value in values]
            point[axis] = max(tried, key=lambda result: result["ndcg@10"])[axis]
        return point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    args = parser.parse_args()
    runs = Runs(args.jobs)
    with ThreadPoolExecutor(args.jobs) as threads:
        for table in args.tables:
            cells = TABLES[table]
            points = dict(zip(cells, threads.map(runs.point, cells), strict=True))
            jobs = [
                (name, task, "test", seed, points[name])
                for seed in args.seeds
                for task in TASKS_OF.get(table, ("stdlib",))
                for name, cell in cells.items()
                if seed in cell.seeds
            ]
            results = list(threads.map(lambda job: runs.result(*job), jobs))
            searched = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*-dev-*.json"))]
            write(table, cells, results, searched)
    runs.close()


if __name__ == "__main__":
    main()
