"""What ``accelerate launch`` runs for test_launch.py: the real trainer of this world, in every process of a group."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainerCallback

import st_colbert_losses
from tests.models import WORDS, tiny_model
from tests.test_resume import SAVED, run
from tests.test_trainers import trainer_for

FORMS: dict[str, dict[str, Any]] = {
    "ColbertLoss": {},
    "CachedColbertNegativeCELoss": {"mini_batch_size": 2},
    "MoCoColbertLoss": {"queue_size": 12, "momentum": 0.8},
}
COLUMNS = {"query": 4, "positive": 11, "negative": 11}  # words at most
ROWS, BATCH = 15, 8  # of all processes, so the last batch lacks a row
CASES = [
    (name, *how) for name in FORMS for how in ((1, torch.float32), (2, torch.float64))
]  # without micro-batches and with


def rows() -> Dataset:
    """Queries and documents of other lengths, two rows with a positive and a label in common."""
    generator = torch.Generator().manual_seed(0)

    def text(longest: int) -> str:
        chosen = torch.randint(len(WORDS), (int(torch.randint(1, longest + 1, (), generator=generator)),))
        return " ".join(WORDS[i] for i in chosen)

    torch.manual_seed(0)
    columns = {name: [text(longest) for _ in range(ROWS)] for name, longest in COLUMNS.items()}
    columns["positive"][9] = columns["positive"][2]
    return Dataset.from_dict({**columns, "label": [*range(ROWS - 2), 4, 4]})


def gradients(
    model: nn.Module, name: str, accumulate: int, dtype: torch.dtype, processes: int, folder: Path, **options: Any
) -> dict[str, Any]:
    """Two optimizer steps of SGD on an epoch: the gradients of each, and the queue after them."""
    model = copy.deepcopy(model).to(dtype)
    loss = getattr(st_colbert_losses, name)(model, temperature=0.5, gather_across_devices=processes > 1, **FORMS[name])
    steps: list[dict[str, Tensor]] = []

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            steps.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})

    trainer = trainer_for(
        model,
        loss,
        folder,
        rows(),
        max_steps=2,
        per_device_train_batch_size=BATCH // accumulate // processes,
        gradient_accumulation_steps=accumulate,
        accelerator_config={"even_batches": False},
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        **options,
    )
    trainer.args.dataloader_drop_last = False  # which the arguments set where there are several processes
    trainer.add_callback(Record())
    trainer.train()
    return {"steps": steps, "queue": loss.queue.state() if name.startswith("MoCo") else None}


def resumed(model: nn.Module, gather: bool, folder: Path) -> dict[str, Any]:
    """A training of six steps, and the last three of them again from its checkpoint."""

    def build(model: nn.Module) -> nn.Module:
        return st_colbert_losses.MoCoColbertLoss(
            model, queue_size=9, momentum=0.7, temperature=0.1, gather_across_devices=gather
        )

    whole = run(build, folder / "whole", model=copy.deepcopy(model))
    checkpoint = folder / "whole" / f"checkpoint-{SAVED}"
    return {"whole": whole, "resumed": run(build, folder / "again", resume=checkpoint, model=copy.deepcopy(model))}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # The device that accelerate gives to several processes on a CPU; transformers loads an optimizer to it, which
    # torch 2.11 does not know how to do.
    torch.serialization.register_package(99, lambda _: None, lambda obj, where: obj if where == "cpu:0" else None)
    model, with_dropout = tiny_model(), tiny_model(dropout=0.2)  # in a group, one process alone could save them
    cases = {case: gradients(model, *case, processes=2, folder=folder) for case in CASES}
    name = "CachedColbertNegativeCELoss"
    cases[name, "every parameter reports"] = gradients(
        model, name, 1, torch.float64, 2, folder, ddp_find_unused_parameters=False
    )
    for gather in (False, True):
        cases["resume", gather] = resumed(with_dropout, gather, folder / f"gather_{gather}")
    torch.save(cases, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # as in tests/ranks.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
