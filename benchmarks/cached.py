"""Gradient caching: step time and peak memory, ours and the peers', on a random 6-layer, 384-wide BERT.

    make bench-cached

Times are CPU time of a forward and backward, all methods in turn within each round, so that a machine whose speed
drifts is the same for all: ratios are formed within a round, and their medians and spreads are printed. Peak
memory is that of a fresh process each, less what it held before the step. Every method gets the same features, of the
same model, padded to the batch's longest row.

The peers need both libraries in one environment: world M's, plus ``pip install --no-deps pylate`` and what it imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MINI_BATCH = 16
LARGE = 512  # a batch whose memory alone is measured
QUERY_TOKENS, SHORTEST, LONGEST = 32, 20, 180
HEADING, END = "## Gradient caching", "<!-- end of gradient caching -->"
PAGE = Path("docs/benchmarks.md")
METHODS = ["ours direct", "ours cached", "ours cached, unsorted", "PyLate cached", "ST cached"]


def build_model() -> nn.Module:
    from sentence_transformers import MultiVectorEncoder
    from transformers import BertConfig, BertModel, BertTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(2000))]
        Path(folder, "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        BertTokenizerFast(vocab=str(Path(folder, "vocab.txt"))).save_pretrained(folder)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(words),
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertModel(config).save_pretrained(folder)
        return MultiVectorEncoder(folder, device="cpu").train()


def build_features(rows: int, varied: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    columns = []
    for width, vary in ((QUERY_TOKENS, False), (LONGEST, varied)):
        lengths = torch.full((rows,), width)
        if vary:
            lengths = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=generator)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(5, 2005, mask.shape, generator=generator) * mask
        columns.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    return columns


class Plain(nn.Module):
    """The same model without its name: ours cannot sort or trim what it does not know, and PyLate's reads its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.skiplist: list[int] = []
        self.do_query_expansion = False

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model(features, task="document")


def build_loss(method: str, model: nn.Module) -> Callable[[list[dict[str, Tensor]]], Tensor]:
    from st_colbert_losses import CachedColbertLoss, ColbertLoss

    if method == "ours direct":
        return ColbertLoss(model)
    if method == "ours cached":
        return CachedColbertLoss(model, mini_batch_size=MINI_BATCH)
    if method == "ours cached, unsorted":
        return CachedColbertLoss(Plain(model), mini_batch_size=MINI_BATCH)
    if method == "PyLate cached":
        from pylate.losses import CachedContrastive

        return CachedContrastive(Plain(model), mini_batch_size=MINI_BATCH, temperature=0.64)
    from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

    return CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=MINI_BATCH, scale=1 / 0.64)


def step(
    loss: Callable[[list[dict[str, Tensor]]], Tensor], model: nn.Module, features: list[dict[str, Tensor]]
) -> None:
    model.zero_grad(set_to_none=True)
    loss([{key: value.clone() for key, value in column.items()} for column in features]).backward()


def measure_times(rows: int, varied: bool, rounds: int, methods: list[str]) -> dict[str, list[float]]:
    model, features = build_model(), build_features(rows, varied)
    losses = {method: build_loss(method, model) for method in methods}
    times: dict[str, list[float]] = {method: [] for method in methods}
    warm_up = build_features(4, varied)
    for loss in losses.values():
        step(loss, model, warm_up)
    for i in range(rounds):
        for method in methods[i % len(methods) :] + methods[: i % len(methods)]:
            start = time.process_time()
            step(losses[method], model, features)
            times[method].append(time.process_time() - start)
    return times


def measure_memory(method: str, rows: int, varied: bool) -> float:
    """Peak MiB of one step beyond what the process held before; the resident size is reset to be that of the step."""
    model, features = build_model(), build_features(rows, varied)
    loss = build_loss(method, model)
    step(loss, model, build_features(2, False))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    step(loss, model, features)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_fresh_process(method: str, rows: int, varied: bool) -> float:
    command = [sys.executable, "-m", "benchmarks.cached", "--memory-of", method, "--rows", str(rows)]
    command += ["--varied"] * varied
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(output.strip().splitlines()[-1])


def median_and_spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def overhead_per_mini_batch() -> float:
    """Milliseconds that a mini-batch costs on a model that computes next to nothing."""
    from st_colbert_losses import CachedColbertLoss, ColbertLoss
    from tests.encoder import Encoder, batch

    encoder, features = Encoder(), batch(rows=64, columns=2)
    direct, cached = ColbertLoss(encoder), CachedColbertLoss(encoder, mini_batch_size=2)
    spent: dict[nn.Module, list[float]] = {direct: [], cached: []}
    for _ in range(20):
        for loss, times in spent.items():
            encoder.seen.clear()
            start = time.process_time()
            loss(features).backward()
            times.append(time.process_time() - start)
    return 1000 * (statistics.median(spent[cached]) - statistics.median(spent[direct])) / 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cached.json"))
    parser.add_argument("--memory-of", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--varied", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    if args.memory_of:
        print(measure_memory(args.memory_of, args.rows, args.varied))
        return

    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.cached " + " ".join(sys.argv[1:]),
        "machine": f"{os.cpu_count()} cores, {args.threads} thread(s), {platform.machine()}",
        "versions": versions(),
        "overhead per mini-batch, ms": round(overhead_per_mini_batch(), 2),
        "cells": [],
    }
    print(
        f"overhead per mini-batch on a model of 400 parameters: {results['overhead per mini-batch, ms']} ms",
        flush=True,
    )
    cells: list[dict[str, Any]] = results["cells"]
    peak = in_fresh_process("ours cached", LARGE, False)
    large = {"rows": LARGE, "varied": False, "MiB": {"ours cached": peak}}
    print(f"batch {LARGE}: peak {peak:.0f} MiB", flush=True)
    for rows in args.batches:
        for varied in (False, True):
            times = measure_times(rows, varied, args.rounds, METHODS)
            memory = {method: in_fresh_process(method, rows, varied) for method in METHODS}
            cells.append({"rows": rows, "varied": varied, "seconds": times, "MiB": memory})
            ours = times["ours cached"]
            documents = f"{SHORTEST}..{LONGEST}" if varied else f"{LONGEST}"
            print(
                f"batch {rows}, documents of {documents} tokens: cached {statistics.median(ours):.1f} s a step",
                flush=True,
            )
            for method in METHODS:
                ratios = [mine / other for mine, other in zip(ours, times[method], strict=True)]
                print(
                    f"  {method:24} our cached / it: {median_and_spread(ratios):18} peak {memory[method]:7.0f} MiB",
                    flush=True,
                )
            save(results, args.output)
    cells.append(large)
    save(results, args.output)
    write_section(HEADING, report(results))


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    lines = [
        HEADING,
        "",
        "A random 6-layer, 384-wide BERT, mini-batch 16, queries of 32 tokens; forward and backward. `ratio` is our",
        "cached form's CPU time over the method's, the median and range over rounds; `MiB` the peak of a step in a",
        f"fresh process beyond what it held before. On {results['date']}, {results['machine']}, "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + f"; `{results['command']}`.",
        "",
        "| batch | documents | " + " | ".join(f"{method}: ratio | MiB" for method in METHODS) + " |",
        "|---|---|" + "---|---|" * len(METHODS),
    ]
    for cell in results["cells"]:
        documents = f"{SHORTEST}..{LONGEST}" if cell["varied"] else str(LONGEST)
        row = [str(cell["rows"]), documents]
        for method in METHODS:
            ratio = "-"
            if "seconds" in cell:
                times = zip(cell["seconds"]["ours cached"], cell["seconds"][method], strict=True)
                ratio = median_and_spread([mine / other for mine, other in times])
            row += [ratio, f"{cell['MiB'][method]:.0f}" if method in cell["MiB"] else "-"]
        lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        f"A mini-batch costs {results['overhead per mini-batch, ms']} ms on a model that computes next to nothing.",
    ]
    return "\n".join(lines) + "\n"


def write_section(heading: str, section: str) -> None:
    """Put a section into docs/benchmarks.md in place of its last version."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Benchmarks\n\n"
    before, _, rest = text.partition(heading + "\n")
    _, _, after = rest.partition(END)  # what was written by hand stays
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(f"{before.rstrip()}\n\n{section}\n{END}{after}", encoding="utf-8")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import st_colbert_losses

    names = ["torch", "transformers", "sentence-transformers", "pylate"]
    found = {"python": platform.python_version(), **{name: version(name) for name in names}}
    return {**found, "st-colbert-losses": st_colbert_losses.__version__}


def save(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
