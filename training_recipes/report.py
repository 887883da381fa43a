"""What a training run leaves behind: the comparison, and a picture of its curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVE = "training_curve.png"


class Result(NamedTuple):
    """The two metrics of one retrieval system."""

    system: str
    ndcg: float
    recall: float


def result_of(system: str, metrics: dict[str, Any]) -> Result:
    """Pick the two metrics out of an evaluator's answer, whatever prefix it gives its keys."""
    found = {key.rpartition("_")[2]: float(value) for key, value in metrics.items()}
    return Result(system, found["ndcg@10"], found["recall@10"])


def comparison(results: list[Result]) -> str:
    """Return the results as a table that reads well in a terminal and in Markdown."""
    width = max(len(result.system) for result in results)
    rows = [f"| {result.system:<{width}} | {result.ndcg:>7.4f} | {result.recall:>9.4f} |" for result in results]
    head = [f"| {'':<{width}} | nDCG@10 | recall@10 |", f"|{'-' * (width + 2)}|--------:|----------:|"]
    return "\n".join(head + rows)


def draw_curve(history: list[dict[str, Any]], folder: Path, title: str) -> None:
    """Draw training loss and dev nDCG@10 over optimizer steps from the trainer's log history."""
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    scores = [(entry["step"], value) for entry in history for key, value in entry.items() if key.endswith("ndcg@10")]
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(*zip(*losses, strict=True), color="tab:blue") if losses else None
    left.set(xlabel="optimizer step", title=title)
    left.set_ylabel("training loss", color="tab:blue")
    right = left.twinx()
    right.plot(*zip(*scores, strict=True), color="tab:orange", marker="o") if scores else None
    right.set_ylabel("dev nDCG@10", color="tab:orange")
    figure.savefig(folder / CURVE, dpi=120)
    plt.close(figure)
