"""From results to the tables and pictures in docs/."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.quality.cells import LEARNING_RATE, Cell
from benchmarks.quality.peers import PEERS

Results = Sequence[dict[str, Any]]
PAGES = {"queue": "queue.md", "options": "options.md"}  # of the others, benchmarks.md
METRICS = {"ndcg@10": "nDCG@10", "recall@10": "recall@10", "mrr@10": "MRR@10"}
FEW = {"low overlap ndcg@10": "nDCG@10, few shared words"}
COSTS = {"seconds": "training, CPU s", "MiB": "peak, MiB"}
TASKS = {"stdlib": "Docstrings", "wordnet": "WordNet"}


def write(table: str, cells: Mapping[str, Cell], results: Results, searched: Results) -> None:
    """Put a table into its page in place of its last version, between two comments."""
    lines = [f"`make bench-quality ARGS={table}`, {when(results)}.", ""]
    if table == "peers":
        for task, title in TASKS.items():
            of_task = [r for r in results if r["task"] == task]
            seeds = sorted({r["seed"] for r in of_task})
            lines += [f"### {title}", "", f"{seeds_of(seeds)} {len(of_task)} runs.", ""]
            points = {axis: title for axis, title in AXES.items() if task == "stdlib"}
            lines += [*table_of(cells, of_task, points, METRICS | FEW, COSTS if task == "stdlib" else {}), ""]
        lines += ["![nDCG@10 of each row on both tasks](images/quality.png)", ""]
        lines += ["### What was searched", "", *search_table(cells, searched), ""]
        lines += ["![nDCG@10 on dev against the temperature](images/temperature.png)", ""]
        draw_quality(cells, results)
        draw_temperatures(cells, searched)
    else:
        metrics = METRICS | FEW if all(name in r for r in results for name in FEW) else METRICS
        lines += [seeds_of(sorted({r["seed"] for r in results})), ""]
        points = {axis: title for axis, title in AXES.items() if any(axis in r for r in results)}
        lines += [*table_of(cells, results, points, metrics, COSTS), ""]
    page = Path("docs", PAGES.get(table, "benchmarks.md"))
    begin, end = f"<!-- {table}: written by benchmarks/quality -->", f"<!-- end of {table} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(before + "\n".join([begin, "", *lines, end]) + rest.partition(end)[2], encoding="utf-8")
    print(f"{page} is up to date")


AXES = {"bias": "bias", "temperature": "T", LEARNING_RATE: "learning rate"}


def when(results: Results) -> str:
    dates = sorted({r["date"] for r in results})
    versions = ", ".join(f"{name} {number}" for name, number in results[-1]["versions"].items())
    return f"{' to '.join({dates[0]: 0, dates[-1]: 0})}, {versions}"


def seeds_of(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"Seed {seeds[0]}."
    return f"Seeds {', '.join(map(str, seeds))}: the mean and, in brackets, the range."


def table_of(
    cells: Mapping[str, Cell],
    results: Results,
    points: Mapping[str, str],
    metrics: Mapping[str, str],
    costs: Mapping[str, str],
) -> list[str]:
    """Rows of Markdown: where the cell stood, mean and range over seeds, and what it cost."""
    heads = [*points.values(), *metrics.values(), *costs.values()]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in cells:
        of_cell = [r for r in results if r["cell"] == name]
        if not of_cell:
            continue
        row = [f"{of_cell[0][axis]:g}" if axis in of_cell[0] else "" for axis in points]
        row += [spread([r[metric] for r in of_cell], 3) for metric in metrics]
        row += [f"{statistics.median(r[c] for r in of_cell):,.0f}" if c in of_cell[0] else "" for c in costs]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if low == high else f"{mean} ({low:.{digits}f}-{high:.{digits}f})"


def search_table(cells: Mapping[str, Cell], searched: Results) -> list[str]:
    """Every point that was tried: nDCG@10 on dev, the best of each axis in bold."""
    lines = ["| | axis | tried: nDCG@10 on dev |", "|---|---|---|"]
    for name, cell in cells.items():
        for axis in cell.search:
            tried = along(name, cell, axis, searched)
            best = max(tried.values())
            values = (f"{x:g}: {'**' * (y == best)}{y:.3f}{'**' * (y == best)}" for x, y in tried.items())
            lines.append(f"| {name} | {AXES[axis]} | {', '.join(values)} |")
    return lines


def along(name: str, cell: Cell, axis: str, searched: Results) -> dict[float, float]:
    """The dev nDCG@10 of each value of an axis: of the points that were tried for it, the others standing still."""
    of_cell = [r for r in searched if r["cell"] == name]
    others = [other for other in AXES if other != axis and other in of_cell[0]]
    groups: dict[tuple[float, ...], dict[float, float]] = {}
    for r in of_cell:
        groups.setdefault(tuple(r[other] for other in others), {})[r[axis]] = r["ndcg@10"]
    found = max(groups.values(), key=len)
    return {value: found[value] for value in cell.search[axis]}


def draw_quality(cells: Mapping[str, Cell], results: Results) -> None:
    """One line a row, one panel a task: the mean, and the seeds around it."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 5), sharey=True, layout="constrained")
    names = list(cells)
    for panel, (task, title) in zip(panels, TASKS.items(), strict=True):
        for row, name in enumerate(reversed(names)):
            values = [r["ndcg@10"] for r in results if r["cell"] == name and r["task"] == task]
            if values:
                loss = cells[name].loss
                colour = "tab:orange" if loss in PEERS else "tab:gray" if "Loss" not in str(loss) else "tab:blue"
                panel.plot([min(values), max(values)], [row, row], color=colour, linewidth=3, alpha=0.4)
                panel.plot(statistics.mean(values), row, "o", color=colour)
        panel.set(title=title, xlabel="nDCG@10, test", yticks=range(len(names)), yticklabels=names[::-1])
        panel.grid(axis="x", alpha=0.3)
    figure.savefig("docs/images/quality.png", dpi=110)
    plt.close(figure)


def draw_temperatures(cells: Mapping[str, Cell], searched: Results) -> None:
    """Dev nDCG@10 against T, of losses on means and of losses on sums."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, cell in cells.items():
        if "temperature" in cell.search:
            on_sums = cell.loss in PEERS or cell.teacher
            tried = along(name, cell, "temperature", searched)
            panels[int(on_sums)].plot(list(tried), list(tried.values()), "o-", label=name)
    for panel, title in zip(panels, ("mean over query tokens", "sum over query tokens"), strict=True):
        panel.set(xscale="log", xlabel=f"temperature of the {title}")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("nDCG@10, dev")
    figure.savefig("docs/images/temperature.png", dpi=110)
    plt.close(figure)
