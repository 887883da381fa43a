"""The cached and MoCo forms in the real trainers: the direct updates, bfloat16, accumulation, torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn

import st_colbert_losses
from tests.models import assert_same_gradients, tiny_model
from tests.test_trainers import NAMES, ROWS, through_compile, train, updates

DATA = Dataset.from_dict(ROWS)


def form(prefix: str, name: str, **options):
    return lambda model: getattr(st_colbert_losses, prefix + name)(model, temperature=0.1, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_cached_updates_are_the_direct_ones(name: str, accumulate: int, tmp_path: Path) -> None:
    rows = {"per_device_train_batch_size": 6 // accumulate, "gradient_accumulation_steps": accumulate}
    direct = updates(form("", name), tmp_path, DATA, **rows)
    cached = updates(form("Cached", name, mini_batch_size=2), tmp_path, DATA, **rows)
    assert_same_gradients(cached, direct, 1e-5)  # float32, other groups of rows
    moco = updates(form("MoCo", name, mini_batch_num_tokens=20), tmp_path, DATA, **rows)
    if accumulate == 1:  # else the second micro-batch finds the first in the queue
        assert_same_gradients(moco, direct, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_in_bfloat16(checkpointing: bool, tmp_path: Path) -> None:
    """The replay computes in bfloat16 as the first pass did, with and without checkpointing in the encoder."""
    options = {"bf16": True, "gradient_checkpointing": checkpointing, "per_device_train_batch_size": 6}
    dtypes: list[torch.dtype] = []

    def watched(model: nn.Module) -> nn.Module:
        dense = next(m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == 16)
        dense.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
        return form("Cached", "ColbertLoss", mini_batch_size=2)(model)

    direct = updates(form("", "ColbertLoss"), tmp_path, DATA, **options)
    cached = updates(watched, tmp_path, DATA, **options)
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) >= 9 + 8  # three columns of three mini-batches, all but the last of them twice
    # Weights move by sums of bfloat16 products over other groups of rows: its rounding is 2^-8.
    assert_same_gradients(cached, direct, 3e-2)


def test_the_momentum_encoder_computes_in_bfloat16_too(tmp_path: Path) -> None:
    """It was copied before the trainer put autocast into the model's forward."""
    dtypes: list[torch.dtype] = []

    def watched(model: nn.Module) -> nn.Module:
        loss = form("MoCo", "ColbertLoss", queue_size=8)(model)
        dense = next(m for m in loss.momentum_model.modules() if isinstance(m, nn.Linear) and m.in_features == 16)
        dense.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
        return loss

    updates(watched, tmp_path, DATA, bf16=True)
    assert dtypes
    assert set(dtypes) == {torch.bfloat16}


@through_compile
@pytest.mark.filterwarnings("ignore:.*recompile_limit:UserWarning")
def test_cached_compiled_by_the_trainer(tmp_path: Path) -> None:
    build = form("Cached", "ColbertPairwiseCELoss", mini_batch_size=4)
    eager = updates(build, tmp_path, DATA, per_device_train_batch_size=6)
    compiled = updates(
        build, tmp_path, DATA, per_device_train_batch_size=6, torch_compile=True, torch_compile_backend="aot_eager"
    )
    assert_same_gradients(compiled, eager, 1e-5)  # float32, fused otherwise


@pytest.mark.parametrize("name", NAMES)
def test_moco_loss_falls(name: str, tmp_path: Path) -> None:
    """The evaluation, which sees the batch alone, falls as well as with the direct form's training."""
    model = tiny_model(dropout=0.1)
    loss = form("MoCo", name, queue_size=16, momentum=0.9)(model)
    losses = train(
        model, loss, tmp_path, Dataset.from_dict({k: v[:3] for k, v in ROWS.items()}), max_steps=25, learning_rate=1e-2
    )
    assert len(loss.queue) == 16
    assert loss.steps == 25
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]) or losses[-1] < 0.05
