"""Gradient all-reduces of an optimizer step and what gradient comes of it, ours and the peers': two gloo processes.

    make bench-all-reduces

Each rank has 4 rows of 3 columns. Counted is how often DistributedDataParallel reduces a bucket (the model is so small
that it is one), by a communication hook. The gradient is compared with that of the same library's direct loss in one
process: over all 8 rows where documents are shared, else the mean of both ranks'. Writes into docs/scaling.md.
"""

from __future__ import annotations

import copy
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.scaling import PAGE, write_between
from tests.encoder import Encoder
from tests.ranks import run_ranks

Features = list[dict[str, Tensor]]
Build = Callable[[nn.Module], nn.Module]
ROWS, COLUMNS, WIDTH = 4, 3, 5
TEMPERATURE = 0.5  # of a mean over query tokens


class Model(Encoder):
    """What all three libraries take for one of theirs."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = True

    def forward(self, features: dict[str, Tensor], task: str = "") -> dict[str, Tensor]:
        return super().forward(features)


def methods() -> dict[str, tuple[Build, Build, bool]]:
    """The loss, the same library's direct loss, and whether documents are shared."""
    from pylate.losses import CachedContrastive, Contrastive
    from sentence_transformers.multi_vector_encoder.losses import (
        CachedMultiVectorMultipleNegativesRankingLoss,
        MultiVectorMultipleNegativesRankingLoss,
    )

    from st_colbert_losses import CachedColbertLoss, ColbertLoss, MoCoColbertLoss

    temperature = TEMPERATURE * WIDTH  # of a sum
    families: dict[str, tuple[type, dict[str, Any], dict[str, tuple[type, dict[str, Any]]]]] = {
        "ours": (
            ColbertLoss,
            {"temperature": TEMPERATURE},
            {
                "direct": (ColbertLoss, {}),
                "cached, mini-batch 1": (CachedColbertLoss, {"mini_batch_size": 1}),
                "cached, mini-batch 2": (CachedColbertLoss, {"mini_batch_size": 2}),
                "MoCo, the queue still filling": (MoCoColbertLoss, {"warmup_steps": 1}),
            },
        ),
        "PyLate": (
            Contrastive,
            {"temperature": temperature},
            {
                "direct": (Contrastive, {}),
                "cached, mini-batch 1": (CachedContrastive, {"mini_batch_size": 1}),
                "cached, mini-batch 2": (CachedContrastive, {"mini_batch_size": 2}),
            },
        ),
        "sentence-transformers": (
            MultiVectorMultipleNegativesRankingLoss,
            {"scale": 1 / temperature},
            {
                "direct": (MultiVectorMultipleNegativesRankingLoss, {}),
                "cached, mini-batch 1": (CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 1}),
                "cached, mini-batch 2": (CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 2}),
            },
        ),
    }
    found = {}
    for library, (direct, options, forms) in families.items():
        for form, (loss, extra) in forms.items():
            for gather in (False, True):
                build = _build(loss, {**options, **extra, "gather_across_devices": gather})
                found[f"{library} {form}{', gathered' * gather}"] = (build, _build(direct, options), gather)
    return found


def _build(loss: type, options: dict[str, Any]) -> Build:
    return lambda model: loss(model, **options)


def batch(rows: int, seed: int) -> Features:
    """No padding and, nearly surely, no two equal inputs: what libraries treat differently stays out."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, WIDTH, dtype=torch.long)
    return [
        {"input_ids": torch.randint(0, 50, (rows, WIDTH), generator=generator), "attention_mask": mask.clone()}
        for _ in range(COLUMNS)
    ]


def measure(rank: int, build: Build, direct: Build, gather: bool, micro_batches: int) -> dict[str, Any]:
    """One optimizer step of some micro-batches."""
    torch.manual_seed(0)
    model = Model().double()
    alone = copy.deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    reduced: list[int] = []

    def count(state, bucket):  # DDP reads annotations, and would not understand these
        reduced.append(bucket.index())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    loss, reference = build(ddp), direct(alone)
    counts = []
    for i in range(micro_batches):
        whole = batch(2 * ROWS, seed=i)
        mine = [{key: value[rank * ROWS :][:ROWS] for key, value in column.items()} for column in whole]
        before = len(reduced)
        with ddp.no_sync() if i + 1 < micro_batches else nullcontext():
            (loss(copied(mine)) / micro_batches).backward()
        counts.append(len(reduced) - before)
        (reference(copied(whole if gather else mine)) / micro_batches).backward()
    gradient, true = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, alone))
    if not gather:
        torch.distributed.all_reduce(true)
        true /= 2
    factor = float(gradient @ true / (true @ true))
    difference = float((gradient / factor - true).abs().max() / true.abs().max())
    return {"counts": counts, "factor": factor, "difference": difference}


def copied(features: Features) -> Features:
    return [{key: value.clone() for key, value in column.items()} for column in features]


def measure_all(rank: int, output: str) -> None:
    warnings.simplefilter("ignore")
    results = {
        name: [measure(rank, *method, micro_batches) for micro_batches in (1, 2)] for name, method in methods().items()
    }
    if rank == 0:
        Path(output).write_text(json.dumps(results), encoding="utf-8")


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    packages = ("torch", "pylate", "sentence-transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [
        f"`make bench-all-reduces`, {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}. Two "
        f"ranks of {ROWS} rows and {COLUMNS} columns, float64. The gradient of a step of two micro-batches, as a "
        "multiple of the true one and its largest difference from that multiple.",
        "",
        "| loss | all-reduces a step | with two micro-batches | gradient / true | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (one, two) in results.items():
        cells = [name, str(one["counts"][0]), " + ".join(map(str, two["counts"]))]
        cells += [f"{two['factor']:.4f}", f"{two['difference']:.0e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.json")
        run_ranks(measure_all, 2, Path(folder), str(output))
        text = report(json.loads(output.read_text(encoding="utf-8")))
    print(text)
    write_between(PAGE, "all-reduces", text)


if __name__ == "__main__":
    main()
