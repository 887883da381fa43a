"""What a loss says in the log, once, and when it keeps silent."""

from __future__ import annotations

import logging

import pytest
import torch

import st_colbert_losses
from st_colbert_losses import CachedColbertLoss, ColbertLoss, LateInteractionLoss, MoCoColbertLoss
from tests.batches import Passthrough, make_batch
from tests.encoder import Encoder, batch


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "st_colbert_losses")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertNegativeCELoss", "ColbertSigmoidLoss"])
@pytest.mark.parametrize(
    ("options", "warns"),
    [({"temperature": 1.0}, True), ({}, False), ({"temperature": 1.0, "normalize_scores": False}, False)],
)
def test_a_temperature_for_sums_on_means(name, options, warns, said):
    loss = getattr(st_colbert_losses, name)(Encoder(), **options)
    for _ in range(2):
        loss(batch())
    told = [message for message in said() if "temperature=" in message]
    assert len(told) == warns
    assert all("divides means over query tokens here, not sums" in message for message in told)


@pytest.mark.parametrize("name", ["ColbertPairwiseCELoss", "ColbertPairwiseNegativeCELoss"])
def test_the_pairwise_losses_own_temperature(name, said):
    getattr(st_colbert_losses, name)(Encoder(), temperature=1.0)(batch())
    assert said() == []


def test_a_label_that_leaves_few_negatives(said):
    loss = ColbertLoss(Encoder())
    loss(batch(rows=10, columns=2), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 8]))
    assert said() == []
    loss(batch(rows=10, columns=2), torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 2]))
    (message,) = said()
    assert "62% of the candidates in a batch are no negatives" in message  # 8 * 7 of 90 pairs


def test_a_last_batch_of_one_row_does_not_use_up_the_warning_of_copies(said):
    loss = ColbertLoss(Encoder())
    loss(batch(rows=1, columns=2))
    loss(batch(rows=4, columns=2), torch.ones(4, dtype=torch.long))
    first, second = said()
    assert "(it has one row)" in first
    assert "(its rows are copies, share a label, or are empty)" in second


def test_a_queue_is_to_fill_at_batches_of_one_row(said):
    MoCoColbertLoss(Encoder(), queue_size=8)(batch(rows=1, columns=2))
    assert said() == []


def test_options_of_a_filter_that_is_off(said):
    loss = ColbertLoss(Encoder(), filter_mode="mask", filter_margin=0.05)
    loss(batch())
    (message,) = said()
    assert "filter_mode, filter_margin without pos_aware_negative_filtering=True" in message
    ColbertLoss(Encoder(), filter_mode="mask", pos_aware_negative_filtering=True)(batch())
    assert len(said()) == 1


def test_an_objective_that_forgets_what_is_no_negative(said):
    rows = make_batch([2, 2], [[2], [2]])
    assert LateInteractionLoss(Passthrough(), lambda scores: scores.pool.mean(1))(rows.features).isinf()
    (message,) = said()
    assert "the objective returns NaN or infinity" in message


@pytest.mark.parametrize("cls", [ColbertLoss, CachedColbertLoss, MoCoColbertLoss])
def test_a_frozen_model(cls):
    encoder = Encoder().requires_grad_(False)
    with pytest.raises(ValueError, match=f"{cls.__name__}: got a model none of whose 3 parameters needs a gradient"):
        cls(encoder)(batch())
    with torch.no_grad():
        assert cls(encoder)(batch()).isfinite()
    learning = cls(encoder, learn_temperature=True)  # of a model that stays as it is
    learning(batch()).backward()
    assert learning.shifts["temperature"].grad.abs() > 0


def test_a_momentum_model_for_no_momentum():
    with pytest.raises(ValueError, match="got a momentum_model with momentum=None"):
        MoCoColbertLoss(Encoder(), momentum=None, momentum_model=Encoder())
