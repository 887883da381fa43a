"""Which keyword arguments a loss takes, those of subclasses that users write, and what becomes of their values."""

from __future__ import annotations

import inspect
import json
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from typing_extensions import Unpack

import st_colbert_losses
from st_colbert_losses import (
    CachedColbertLoss,
    ColbertLoss,
    ColbertSigmoidLoss,
    LateInteractionLoss,
    MoCoColbertLoss,
)
from st_colbert_losses.objectives import infonce
from st_colbert_losses.options import MoCoOptions, Options, check_option
from tests.batches import Passthrough, make_batch
from tests.encoder import Encoder, batch

# What help() is to show, from the documentation: names in order, with their defaults.
COMMON = {
    "use_smooth_max": False,
    "tau": 0.1,
    "pos_aware_negative_filtering": False,
    "filter_threshold": 0.95,
    "filter_factor": 0.5,
    "filter_mode": "damp",
    "filter_margin": None,
    "filter_explicit": False,
    "filter_warmup_steps": 0,
    "norm_tol": 1e-3,
    "mask_duplicate_documents": True,
    "negatives_per_step": None,
    "learn_temperature": False,
    "matryoshka_dims": None,
    "matryoshka_weights": None,
    "gather_across_devices": False,
}
OWN = {
    "ColbertLoss": {"temperature": 0.02, "document_to_query_weight": 0.0},
    "ColbertNegativeCELoss": {
        "temperature": 0.02,
        "in_batch_term_weight": 0.5,
        "document_to_query_weight": 0.0,
    },
    "ColbertPairwiseCELoss": {"temperature": 1.0},
    "ColbertPairwiseNegativeCELoss": {"temperature": 0.02, "in_batch_term_weight": 0.5},
    "ColbertSigmoidLoss": {"temperature": 0.02, "bias": 0.0, "learn_bias": False},
    "ColbertDistillationLoss": {
        "temperature": 1.0,
        "teacher_temperature": 1.0,
        "normalize_teacher_scores": True,
        "normalize_scores": False,
        "contrastive_weight": 0.0,
    },
}
CACHED = {"mini_batch_size": 32, "mini_batch_num_tokens": None, "show_progress_bar": False}
MOCO = {
    "queue_size": 1024,
    "momentum": 0.99,
    "momentum_model": None,
    "queue_dtype": None,
    "enqueue_negatives": False,
    "enqueue_batches": True,
    "warmup_steps": 0,
    "live_documents": True,
    **CACHED,
    "mini_batch_size": None,
}


def defaults(loss: type) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(loss).parameters.values()}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("form", "added"), [("", {}), ("Cached", CACHED), ("MoCo", MOCO)])
def test_help(name, form, added):
    loss = getattr(st_colbert_losses, form + name)
    model, *others = inspect.signature(loss).parameters.values()
    assert (model.name, model.kind) == ("model", model.POSITIONAL_OR_KEYWORD)
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}
    shown = {"model": inspect.Parameter.empty, **OWN[name], **added, **COMMON}
    if "Distillation" not in name:
        shown["normalize_scores"] = True
    assert list(defaults(loss).items()) == list(shown.items())


class Untyped(MoCoColbertLoss):
    def __init__(self, model, **options):
        super().__init__(model, **options)


class Pops(CachedColbertLoss):
    def __init__(self, model, **kwargs):
        alpha = kwargs.pop("alpha", 1.0)
        super().__init__(model, **kwargs)
        self.alpha = alpha


class PopsMore(Pops):
    def __init__(self, *args, beta=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta = beta


class NoConstructor(PopsMore):
    pass


class Fixed(LateInteractionLoss):
    def __init__(self, model, **options):
        super().__init__(model, infonce, **options)


class Typed(MoCoColbertLoss):
    def __init__(self, model, *, queue_size: int = 16, **options: Unpack[MoCoOptions]):
        super().__init__(model, queue_size=queue_size, **options)


class More(Options, total=False):
    alpha: float


class TypedMore(ColbertSigmoidLoss):
    def __init__(self, model, **options: Unpack[More]):
        alpha = options.pop("alpha", 1.0)
        super().__init__(model, **options)
        self.alpha = alpha


class Mixin:
    def __init__(self, *args, alpha=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha


class Mixed(Mixin, MoCoColbertLoss):
    pass


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (Untyped, {"queue_size": 8, "temperature": 0.1, "normalize_scores": False, "mini_batch_size": 2}),
        (Pops, {"mini_batch_size": 8, "alpha": 3.0}),
        (Pops, {"temperature": 0.1}),
        (PopsMore, {"alpha": 3.0, "beta": 4.0, "mini_batch_num_tokens": 64, "tau": 0.2}),
        (NoConstructor, {"alpha": 3.0, "beta": 4.0, "document_to_query_weight": 0.5}),
        (Fixed, {"explicit_negatives": True, "temperature": 0.1}),
        (Typed, {"queue_size": 8, "momentum": 0.5, "filter_factor": 0.1}),
        (TypedMore, {"alpha": 3.0, "tau": 0.2}),
        (Mixed, {"alpha": 3.0, "queue_size": 8, "temperature": 0.1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value),
)
def test_subclasses_take_their_own_and_what_they_extend_takes(loss, options):
    made = loss(Passthrough(), **options)
    assert {name: getattr(made, name) for name in options} == options


def test_help_of_subclasses():
    """Untyped options are those of the class that is extended, and any; typed ones are those of the type."""
    inherited = defaults(MoCoColbertLoss)
    assert defaults(Untyped) == {**inherited, "options": inspect.Parameter.empty}
    assert [p.kind for p in inspect.signature(Untyped).parameters.values()][-1] is inspect.Parameter.VAR_KEYWORD
    named = {"model": inspect.Parameter.empty, "queue_size": 16}
    assert defaults(Typed) == {**MOCO, **COMMON, "normalize_scores": True, **named}
    assert defaults(TypedMore) == {"model": inspect.Parameter.empty, **COMMON, "normalize_scores": True, "alpha": ...}
    assert "objective" not in defaults(Fixed)
    assert defaults(Fixed)["explicit_negatives"] is False
    assert defaults(PopsMore)["mini_batch_size"] == defaults(NoConstructor)["mini_batch_size"] == 32


def test_typed_options_refuse_others():
    with pytest.raises(TypeError, match=r"Typed: got an unknown argument 'queue_sise'.* Did you mean queue_size\?"):
        Typed(Passthrough(), queue_sise=8)
    with pytest.raises(TypeError, match=r"TypedMore: got an unknown argument 'queue_size'"):
        TypedMore(Passthrough(), queue_size=8)


def test_untyped_options_are_refused_where_they_end():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        Untyped(Passthrough(), temprature=0.1)


def test_types_that_only_checkers_see_stand_for_any_option():
    class Local(Options, total=False):
        alpha: float

    class Mine(ColbertLoss):
        def __init__(self, model: Unseen, **options: Unpack[Local]):  # noqa: F821 - as under TYPE_CHECKING
            options.pop("alpha")
            super().__init__(model, **options)

    assert Mine(Passthrough(), alpha=1.0, temperature=0.1).temperature == 0.1


@pytest.mark.parametrize("option", MOCO)
def test_options_of_other_forms_name_the_form(option):
    form = "Cached" if option in CACHED else "MoCo"
    with pytest.raises(TypeError, match=rf"^ColbertLoss: .* Use the {form} form: {form}ColbertLoss for ColbertLoss\."):
        ColbertLoss(Passthrough(), **{option: 1})


@pytest.mark.parametrize("option", ["objective", "explicit_negatives"])
def test_arguments_of_the_general_loss_name_it(option):
    with pytest.raises(TypeError, match=r"^ColbertLoss: .* Use .*LateInteractionLoss"):
        ColbertLoss(Passthrough(), **{option: True})


def test_help_is_named_where_nothing_is_near():
    with pytest.raises(TypeError, match=r"^ColbertLoss: got an unknown argument 'xyz', .* See help\(ColbertLoss\)\.$"):
        ColbertLoss(Passthrough(), xyz=1)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("temperature", np.float32(0.25), 0.25),
        ("temperature", Fraction(1, 4), 0.25),
        ("tau", np.int64(2), 2.0),
        ("matryoshka_weights", (np.float32(0.5), 1), [0.5, 1]),
        ("temperature", 1, 1),
        ("filter_mode", "mask", "mask"),
        ("anything_else", np.float32(0.25), np.float32(0.25)),
    ],
)
def test_numbers_become_pythons_own(name, value, plain):
    checked = check_option("ColbertLoss", name, value)
    assert checked == plain
    assert type(checked) is type(plain)
    if name != "anything_else":
        assert json.loads(json.dumps(checked)) == plain


@pytest.mark.parametrize("value", [torch.tensor(0.02), np.array(0.02), np.bool_(True)])
def test_tensors_are_no_hyperparameters(value):
    with pytest.raises(ValueError, match=r"ColbertLoss: got temperature=.*, expected a finite number above 0\. .+"):
        ColbertLoss(Passthrough(), temperature=value)


def test_config_of_numpys_numbers_is_json():
    loss = ColbertLoss(
        Passthrough(), temperature=np.float32(0.25), matryoshka_weights=(np.float32(1),), matryoshka_dims=(2,)
    )
    config = loss.get_config_dict()
    assert json.loads(json.dumps(config)) == config
    assert config["temperature"] == 0.25


def test_what_an_objective_has_bound_counts():
    """A weight bound by functools.partial: its other half needs the scores of documents over queries."""
    rows = make_batch([3, 2, 1], [[3], [2], [1]])
    bound = LateInteractionLoss(Passthrough(), partial(infonce, document_to_query_weight=0.5), temperature=0.2)
    named = ColbertLoss(Passthrough(), temperature=0.2, document_to_query_weight=0.5)
    one_way = ColbertLoss(Passthrough(), temperature=0.2)
    value = bound(rows.features)
    assert value == named(rows.features)
    assert value != one_way(rows.features)


def test_an_objectives_own_defaults_stay():
    seen = {}

    def objective(scores, temperature, document_to_query_weight=0.7, mine=3):
        seen.update(temperature=temperature, weight=document_to_query_weight, mine=mine)
        return scores.positive * temperature

    LateInteractionLoss(Passthrough(), objective, temperature=0.2)(make_batch([3, 2], [[3], [2]]).features)
    assert seen == {"temperature": 0.2, "weight": 0.7, "mine": 3}


def test_an_objective_of_ones_own_is_cached_by_attribute():
    torch.manual_seed(0)
    encoder, features = Encoder().double(), batch()
    direct, cached = (LateInteractionLoss(encoder, partial(infonce, temperature=0.1)) for _ in range(2))
    cached.mini_batch_size = 2
    gradients = []
    for loss in (direct, cached):
        encoder.zero_grad()
        encoder.seen.clear()
        loss(features).backward()
        gradients.append(encoder.linear.weight.grad.clone())
    assert max(len(hidden) for hidden in encoder.seen) == 2
    torch.testing.assert_close(*gradients)
