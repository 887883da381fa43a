"""The signals of a batch, by hand."""

from __future__ import annotations

import pytest
import torch

from st_colbert_losses import (
    ColbertLoss,
    ColbertNegativeCELoss,
    LateInteractionLoss,
    MoCoColbertLoss,
    Tokens,
)
from st_colbert_losses.objectives import infonce
from st_colbert_losses.signals import MEASURED, Signals
from tests.batches import Passthrough, make_batch

SCORES = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.5, 0.2], [0.0, 0.3, 0.6]])  # positives on the diagonal


def compute(loss, labels=None, scores=SCORES) -> dict[str, float]:
    queries = Tokens(torch.eye(3)[:, None])  # query i reads row i of the scores
    loss.from_tokens(queries, [Tokens(part.T[:, None]) for part in scores.split(3, 1)], labels)
    return loss.metrics


def test_by_hand():
    found = compute(ColbertLoss(Passthrough(), temperature=0.5))
    assert found == pytest.approx(
        {
            "in_batch_accuracy": 2 / 3,  # row 1's positive, 0.5, is below 0.7
            "positive_score": 2.0 / 3,
            "hardest_negative_score": (0.8 + 0.7 + 0.3) / 3,
            "margin": (0.1 - 0.2 + 0.3) / 3,
            "masked_share": 0.0,
            "filtered_share": 0.0,
            "temperature": 0.5,
        },
        rel=1e-5,
    )


def test_masked_and_filtered():
    """Rows 0 and 1 share a label: no negatives of each other. Above 70 % of the positive lies nobody else's."""
    loss = ColbertLoss(Passthrough(), pos_aware_negative_filtering=True, filter_threshold=0.45, filter_mode="mask")
    found = compute(loss, labels=torch.tensor([1, 1, 2]))
    assert found["masked_share"] == pytest.approx(2 / 6)
    assert found["filtered_share"] == pytest.approx(1 / 4)  # 0.3 > 0.45 * 0.6; of 0.1, 0.2, 0.0, 0.3
    assert found["hardest_negative_score"] == pytest.approx((0.1 + 0.2 + 0.3) / 3)  # before the filter
    assert found["in_batch_accuracy"] == 1


def test_explicit_negatives_count_and_rows_without_any_do_not():
    negatives = torch.full((3, 3), 0.65)
    found = compute(ColbertNegativeCELoss(Passthrough()), scores=torch.cat([SCORES, negatives], 1))
    assert found["in_batch_accuracy"] == pytest.approx(1 / 3)
    assert found["hardest_negative_score"] == pytest.approx((0.8 + 0.7 + 0.65) / 3)
    alone = compute(ColbertLoss(Passthrough()), labels=torch.tensor([1, 1, 1]))
    assert alone["in_batch_accuracy"] == alone["margin"] == alone["hardest_negative_score"] == 0
    assert alone["masked_share"] == 1


def test_warm_up_of_the_filter():
    loss = ColbertLoss(
        Passthrough(),
        pos_aware_negative_filtering=True,
        filter_threshold=0.1,
        filter_mode="mask",
        filter_warmup_steps=2,
    )
    assert compute(loss)["filtered_share"] == 0
    loss.after_step(set())
    assert compute(loss)["filtered_share"] == 0
    loss.after_step(set())
    assert compute(loss)["filtered_share"] > 0.5


def test_they_change_nothing():
    """Neither value nor gradient, and what is read is detached."""
    batch = make_batch([2, 2], [[2], [2]])
    loss = ColbertLoss(Passthrough())
    first = loss(batch.features)
    before = dict(loss.metrics)
    second = loss(batch.features)
    assert first == second
    assert before == loss.metrics
    assert all(isinstance(value, float) for value in before.values())


def test_queue_fill_and_age():
    """Three batches of two in a queue of four: the last is of age 0, the one before of age 1."""
    loss = MoCoColbertLoss(Passthrough(), momentum=None, queue_size=4)
    ages, fills = [], []
    for _ in range(4):
        loss(make_batch([2, 2], [[2], [2]]).features)
        ages.append(loss.metrics["queue_age"])
        fills.append(loss.metrics["queue_fill"])
    assert fills == [0, 0.5, 1, 1]
    assert ages == [0, 0, 0.5, 0.5]
    state = loss.own_state()
    other = MoCoColbertLoss(Passthrough(), momentum=None, queue_size=4)
    other.load_own_state(state)
    assert other.queue.mean_age == loss.queue.mean_age == 0.5


def test_means_between_logs():
    loss = LateInteractionLoss(Passthrough(), infonce)
    batch = make_batch([2, 2], [[2], [2]])
    seen = []
    for temperature in (0.1, 0.3):
        loss.temperature = temperature
        loss(batch.features)
        seen.append(loss.metrics)
    with torch.no_grad():
        loss(make_batch([2, 2], [[2], [2]]).features)  # an evaluation is no part of the training's log
    means = loss.signals.read_means()
    assert means == pytest.approx({name: (seen[0][name] + seen[1][name]) / 2 for name in seen[0]}, rel=1e-4)
    assert loss.signals.read_means() == {}


def test_any_name_beside_the_measured_ones():
    """Another signal may bear any name; nothing is read where nothing was measured."""
    signals = Signals()
    assert signals.read() == signals.read_means() == {}
    for value in (1.0, 4.0):
        measured = torch.arange(6.0) * value
        signals.update(measured, {"measured": torch.tensor(value), "temperature": value}, log=True)
    assert signals.read() == {**dict(zip(MEASURED, measured.tolist(), strict=True)), "measured": 4, "temperature": 4}
    means = {**dict(zip(MEASURED, (torch.arange(6.0) * 2.5).tolist(), strict=True)), "measured": 2.5}
    assert signals.read_means() == {**means, "temperature": 2.5}
    assert signals.read_means() == {}
    assert signals.read()["measured"] == 4
