"""Temperature and bias that are learned: their gradients, bounds, state, and what the user reads."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from st_colbert_losses import CachedColbertLoss, ColbertDistillationLoss, ColbertLoss, ColbertSigmoidLoss
from tests import reference
from tests.batches import Passthrough, make_batch

LENGTHS = [3, 2, 1], [[3, 2], [2, 1], [1, 2]]


def own_parameters(loss) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in loss.named_parameters() if not name.startswith("model.")}


def test_off_has_no_parameters():
    assert not own_parameters(ColbertSigmoidLoss(Passthrough()))


@pytest.mark.parametrize("temperature", [0.02, 0.7])
def test_the_first_value_is_exact(temperature):
    rows = make_batch(*LENGTHS)
    fixed = ColbertSigmoidLoss(Passthrough(), temperature=temperature, bias=0.3)
    learned = ColbertSigmoidLoss(
        Passthrough(), temperature=temperature, bias=0.3, learn_temperature=True, learn_bias=True
    )
    value = learned(rows.features)
    assert value == fixed(rows.features)
    assert (learned.temperature, learned.bias) == (temperature, 0.3)
    expected = torch.autograd.grad(fixed(rows.features), rows.leaves)
    for got, want in zip(torch.autograd.grad(value, rows.leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_the_formula():
    """Central differences of the plain loops: by T on the log scale, by the bias as it is."""
    rows = make_batch(*LENGTHS)
    loss = ColbertSigmoidLoss(Passthrough(), temperature=0.4, bias=0.1, learn_temperature=True, learn_bias=True)
    loss(rows.features).backward()

    def value(log_temperature: float, bias: float) -> float:
        options = {"temperature": math.exp(log_temperature), "bias": bias}
        return reference.loss("ColbertSigmoidLoss", rows.rows, **options).item()

    t, h = math.log(0.4), 1e-5
    by_temperature = (value(t + h, 0.1) - value(t - h, 0.1)) / (2 * h)
    by_bias = (value(t, 0.1 + h) - value(t, 0.1 - h)) / (2 * h)
    assert abs(by_temperature) > 1e-3
    assert abs(by_bias) > 1e-3
    gradients = {name: p.grad.item() for name, p in own_parameters(loss).items()}
    # Gradients of a float32 parameter; differences are good to h^2.
    assert gradients == pytest.approx({"shifts.temperature": by_temperature, "shifts.bias": by_bias}, rel=1e-6)


@pytest.mark.parametrize("cls", [ColbertLoss, ColbertDistillationLoss])
def test_every_objective_can_learn_its_temperature(cls):
    rows = make_batch(*LENGTHS)
    loss = cls(Passthrough(), temperature=0.5, learn_temperature=True)
    labels = torch.rand(3, 2) if cls is ColbertDistillationLoss else None
    loss(rows.features, labels).backward()
    assert loss.shifts["temperature"].grad.abs() > 1e-4


def test_cached_and_accumulated():
    """In the cached form the same; halved where the loss is halved."""
    rows = make_batch(*LENGTHS)
    direct = ColbertLoss(Passthrough(), temperature=0.3, learn_temperature=True)
    direct(rows.features).backward()
    cached = CachedColbertLoss(Passthrough(), temperature=0.3, learn_temperature=True, mini_batch_size=2)
    (cached(rows.features) / 2).backward()
    got, want = cached.shifts["temperature"].grad, direct.shifts["temperature"].grad
    torch.testing.assert_close(got, want / 2, rtol=1e-6, atol=0)


def test_its_start_is_saved_with_it():
    loss, other = (ColbertSigmoidLoss(Passthrough(), learn_temperature=True, learn_bias=True) for _ in range(2))
    loss.temperature, loss.bias = 0.05, 0.3
    other.load_state_dict(loss.state_dict())
    assert (other.temperature, other.bias) == (0.05, 0.3)


def test_it_stays_above_its_bound():
    rows = make_batch(*LENGTHS)
    loss = ColbertLoss(Passthrough(), temperature=0.001, learn_temperature=True)
    with torch.no_grad():
        loss.shifts["temperature"].fill_(-20)
    value = loss(rows.features)
    value.backward()
    assert loss.temperature == pytest.approx(1e-4)
    assert value.isfinite()
    assert loss.shifts["temperature"].grad.isfinite()


def test_an_optimizer_trains_it():
    rows = make_batch(*LENGTHS)
    loss = ColbertSigmoidLoss(Passthrough(), temperature=0.5, learn_temperature=True, learn_bias=True)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(rows.features)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values == sorted(values, reverse=True)
    assert loss.temperature != 0.5
    config = loss.get_config_dict()
    assert (config["temperature"], config["learn_temperature"]) == (loss.temperature, True)
    assert (config["bias"], config["learn_bias"]) == (loss.bias, True)
    assert loss.metrics["temperature"] == pytest.approx(loss.temperature, rel=0.2)


def test_assigning_starts_from_there():
    loss = ColbertLoss(Passthrough(), temperature=0.5, learn_temperature=True)
    with torch.no_grad():
        loss.shifts["temperature"].fill_(1.0)
    assert loss.temperature == pytest.approx(0.5 * math.e, rel=1e-5)
    loss.temperature = 0.1
    assert loss.temperature == 0.1
    with pytest.raises(ValueError, match="learn_temperature=False after construction"):
        loss.learn_temperature = False


def test_state_and_copies():
    loss = ColbertLoss(Passthrough(), temperature=0.5, learn_temperature=True)
    with torch.no_grad():
        loss.shifts["temperature"].fill_(0.3)
    for twin in (copy.deepcopy(loss), ColbertLoss(Passthrough(), temperature=0.5, learn_temperature=True)):
        twin.load_own_state(loss.own_state())
        assert twin.temperature == loss.temperature


@pytest.mark.parametrize("option", ["learn_temperature", "learn_bias"])
def test_only_true_or_false(option):
    with pytest.raises(ValueError, match=f"ColbertSigmoidLoss: got {option}=1, expected True or False"):
        ColbertSigmoidLoss(Passthrough(), **{option: 1})
