"""What the losses refuse, what they say once, and what they leave as it was."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import st_colbert_losses
from st_colbert_losses import CachedColbertLoss, ColbertLoss, LateInteractionLoss, Tokens
from st_colbert_losses.features import count_rows, row_bounds, select_rows
from tests.batches import Passthrough, make_batch
from tests.encoder import Encoder, batch
from tests.test_losses import NAMES, build, documents


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("ColbertLoss", "temperature", value) for value in (0, -1, float("nan"), float("inf"), "0.02", None, True)),
        *(("ColbertLoss", "tau", value) for value in (0.0, -0.1, float("inf"))),
        *(("ColbertLoss", "filter_threshold", value) for value in (0.0, 1.1, -1)),
        *(("ColbertLoss", "filter_factor", value) for value in (-0.1, 1.1)),
        ("ColbertLoss", "norm_tol", -1e-3),
        ("ColbertLoss", "normalize_scores", "yes"),
        ("ColbertLoss", "use_smooth_max", 1),
        *(("ColbertNegativeCELoss", "in_batch_term_weight", value) for value in (-0.1, 1.5, float("nan"))),
        ("ColbertPairwiseNegativeCELoss", "in_batch_term_weight", 2),
        ("ColbertSigmoidLoss", "bias", float("nan")),
    ],
)
def test_invalid_hyperparameters(name, option, value):
    """Refused at construction and on assignment, naming the loss, what it got, what it expects and a remedy."""
    with pytest.raises(ValueError, match=rf"{name}: got {option}=.*, expected .*\. .+"):
        build(name, **{option: value})
    loss = build(name)
    before = getattr(loss, option)
    with pytest.raises(ValueError, match=f"{name}: got {option}="):
        setattr(loss, option, value)
    assert getattr(loss, option) == before


def test_arguments_are_keyword_only_and_known():
    with pytest.raises(TypeError):
        ColbertLoss(Passthrough(), 0.02)
    for options, remedy in (
        ({"temprature": 0.02}, "Did you mean temperature"),
        ({"mini_batch_size": 4}, "Use the Cached form"),
        ({"scale": 20.0}, "1 / temperature"),
        ({"xyz": 1}, "See help"),
    ):
        with pytest.raises(TypeError, match=rf"^ColbertLoss: got an unknown argument .*{remedy}"):
            ColbertLoss(Passthrough(), **options)
    with pytest.raises(TypeError, match=r"ColbertLoss: got a model of type str, expected a torch\.nn\.Module"):
        ColbertLoss("bert-base-uncased")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["", "Cached", "MoCo"])
def test_help_shows_every_option_with_its_default(name, form):
    loss = getattr(st_colbert_losses, form + name)
    parameters = inspect.signature(loss).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    made = loss(Passthrough())
    config = made.get_config_dict()
    assert set(config) <= set(parameters)
    assert all(getattr(made, option) == parameters[option].default for option in config)


@pytest.mark.parametrize("features", [None, {}, torch.rand(2, 3), "ab", [torch.rand(2, 3)] * 2])
def test_what_are_no_feature_dicts(features):
    with pytest.raises(ValueError, match=r"ColbertLoss: got .*, expected one feature dict per column"):
        build("ColbertLoss")(features)


def test_what_are_no_tokens():
    tokens, loss = Tokens(torch.rand(2, 3, 4)), build("ColbertLoss")
    for queries, positives in ((tokens.vectors, [tokens]), (tokens, tokens), (tokens, [tokens.vectors])):
        with pytest.raises(
            ValueError, match=r"ColbertLoss: got queries of type .*expected Tokens and a list of Tokens"
        ):
            loss.from_tokens(queries, positives)
    with pytest.raises(ValueError, match=r"ColbertLoss: got embeddings of \[4, 5\] dimensions"):
        loss.from_tokens(tokens, [Tokens(torch.rand(2, 3, 5))])


class Hinge(nn.Module):
    def forward(self, scores, temperature, slope=1.0):
        return slope * (scores.pool.max(1).values - scores.positive + temperature).clamp(min=0)


def test_an_objective_may_be_a_module():
    rows = make_batch([2, 2], [[2, 2]] * 2)
    value = LateInteractionLoss(Passthrough(), Hinge(), temperature=2.5)(rows.features)
    same = LateInteractionLoss(
        Passthrough(), lambda scores, temperature: Hinge()(scores, temperature), temperature=2.5
    )
    assert value == same(rows.features) > 0


def test_an_objective_that_asks_for_what_is_not_there():
    with pytest.raises(ValueError, match="asks for 'alpha', expected hyperparameters of the loss"):
        LateInteractionLoss(Passthrough(), lambda scores, alpha: scores.positive)(make_batch([2], [[2]]).features)


def test_objectives_that_are_none():
    tokens = Tokens(torch.rand(2, 3, 4))
    with pytest.raises(TypeError, match="got an objective of type str"):
        LateInteractionLoss(Passthrough(), "infonce")
    for objective in (lambda scores: None, lambda scores: scores.positive.mean(), lambda scores: scores.pool):
        loss = LateInteractionLoss(Passthrough(), objective)
        with pytest.raises(ValueError, match="from the objective, expected a tensor of 2 losses, one per query"):
            loss.from_tokens(tokens, [tokens])


def test_nan_embeddings_are_named(caplog):
    tokens = Tokens(torch.full((2, 2, 3), float("nan")), torch.ones(2, 2))
    build("ColbertLoss").from_tokens(tokens, [tokens])
    assert len(caplog.records) == 1
    assert "scores are NaN or infinite" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_missing_columns(name):
    batch = make_batch([2, 2], documents(2, 2))
    with pytest.raises(ValueError, match=rf"{name}: got 1 column\(s\), expected a query \+ a positive"):
        build(name)(batch.features[:1])
    if "Negative" in name:
        with pytest.raises(ValueError, match=rf"{name}: got 2 column\(s\), expected .* at least one negative"):
            build(name)(batch.features[:2])


@pytest.mark.parametrize(
    ("column", "rows", "says"),
    [
        (1, 2, "got 2 rows in column 1 for 4 queries"),
        (1, 8, "one positive per query"),
        (2, 6, r"n \* 4"),
        (2, 0, "0 rows"),
    ],
)
def test_mismatched_rows(column, rows, says):
    tokens = [Tokens(torch.rand(4, 2, 3)) for _ in range(3)]
    tokens[column] = Tokens(torch.rand(rows, 2, 3))
    with pytest.raises(ValueError, match=f"ColbertLoss: .*{says}"):
        build("ColbertLoss").from_tokens(tokens[0], tokens[1:])


def test_no_rows():
    empty = Tokens(torch.rand(0, 2, 3))
    with pytest.raises(ValueError, match="ColbertLoss: got 0 queries"):
        build("ColbertLoss").from_tokens(empty, [empty])


@pytest.mark.parametrize(
    "labels",
    [
        torch.rand(3),
        torch.zeros(3, 1, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([True] * 3),
        [1, 2, 3],
    ],
)
def test_invalid_labels(labels):
    batch = make_batch([2, 2, 2], documents(3, 1))
    with pytest.raises(ValueError, match=r"ColbertLoss: got .*labels .*expected a tensor of 3 integers"):
        build("ColbertLoss")(batch.features, labels)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5)])
def test_invalid_tokens(shape):
    with pytest.raises(
        ValueError, match=r"Tokens: got vectors of shape .* expected a floating point tensor \(N, T, D\)"
    ):
        Tokens(torch.rand(*shape))


def test_invalid_token_masks():
    with pytest.raises(ValueError, match="Tokens: got a mask of shape"):
        Tokens(torch.rand(2, 3, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="floating point"):
        Tokens(torch.ones(2, 3, 4, dtype=torch.long))


def test_tokens_without_mask_score_all_but_zero_vectors():
    """A first coordinate of 0 is not padding; a zero vector is, and never wins a maximum over negative cosines."""
    vectors = torch.tensor([[[0.0, 1.0], [0.6, 0.8], [0.0, 0.0]]])
    assert Tokens(vectors).mask.tolist() == [[True, True, False]]
    queries, padded = Tokens(-vectors[:, :2]), Tokens(vectors)
    loss = LateInteractionLoss(Passthrough(), lambda scores, temperature: scores.positive)
    assert loss.from_tokens(queries, [padded]).item() == pytest.approx((-0.8 - 0.8) / 2)


def test_columns_may_be_a_generator_and_stay_as_they_were():
    batch = make_batch([2, 3], documents(2, 2), labels=[1, 2])
    before = [{key: value.clone() for key, value in column.items()} for column in batch.features]

    class Writes(Passthrough):
        def forward(self, features):
            output = super().forward(features)
            features["attention_mask"] = torch.zeros(1)
            return features | output

    loss = ColbertLoss(Writes())
    assert loss(column for column in batch.features) == loss(batch.features)
    for column, old in zip(batch.features, before, strict=True):
        assert column.keys() == old.keys()
        assert all(torch.equal(column[key], old[key]) for key in old)


@pytest.mark.parametrize("kind", ["ids", "long mask", "float mask"])
@pytest.mark.parametrize("form", [ColbertLoss, CachedColbertLoss])
def test_modules_may_write_into_their_features(form, kind):
    class Writes(Encoder):
        def forward(self, features):
            output = super().forward(features)
            features["input_ids" if kind == "ids" else "attention_mask"].zero_()
            return output

    features = batch(rows=4)
    if kind == "float mask":
        for column in features:
            column["attention_mask"] = column["attention_mask"].float()
    before = copy.deepcopy(features)
    encoder = Writes()
    value = form(encoder)(features)
    encoder.__class__ = Encoder
    assert value == form(encoder)(features)
    for column, old in zip(features, before, strict=True):
        assert all(torch.equal(column[key], old[key]) for key in old)


def test_pixels_are_not_copied():
    """They are what is large of a batch, and no module writes into them."""
    pixels = {"pixel_values": torch.rand(8, 3), "input_values": torch.rand(2, 9), "patches": torch.rand(2, 3, 4)}
    seen = {}

    class Looks(Passthrough):
        def forward(self, features):
            seen.update(features)
            return super().forward(features)

    features = make_batch([2, 2], documents(2, 1)).features
    features[1] |= pixels
    ColbertLoss(Looks())(features)
    assert all(seen[key] is value for key, value in pixels.items())


@pytest.mark.parametrize(
    "options", [{"mini_batch_size": 2}, {"mini_batch_size": 9}, {"negatives_per_step": 1}, {}], ids=str
)
def test_what_belongs_to_a_numbered_column_is_ignored(options):
    """Trainers go by prefixes, so they put what ``negative_1`` has into ``negative`` too, as ``1_input_ids``."""
    features = batch(rows=4, columns=4)
    for column, n in zip(features[2:], (3, 4), strict=True):
        column["image_grid_thw"] = torch.tensor([[1, 2, n]] * 4)
        column["pixel_values"] = torch.rand(4 * 2 * n, 6)
    given = [dict(column) for column in features]
    given[2] |= {f"1_{key}": value for key, value in features[3].items()} | {"1_modality": "image"}
    loss = (CachedColbertLoss if "mini_batch_size" in options else ColbertLoss)(Encoder(), **options)
    values = []
    for columns in (features, given):
        torch.manual_seed(0)
        values.append(loss(columns))
    assert values[0] == values[1]
    assert "1_pixel_values" in given[2]


def test_rows_are_those_of_a_columns_own():
    features = {"1_vectors": torch.rand(5, 2), "vectors": torch.rand(4, 2)}
    assert count_rows(features) == 4
    assert select_rows(features, row_bounds(features, 4), [2]).keys() == {"vectors"}


def test_rows_that_cannot_be_told_apart_are_refused_with_a_remedy():
    remedy = "without mini-batches and without negatives_per_step"
    with pytest.raises(ValueError, match=rf"Features: got \['task'\], expected a tensor .*{remedy}"):
        count_rows({"task": "query"})
    with pytest.raises(ValueError, match=rf"Features: got 'pixel_values' of shape \(5, 3\) for 4 rows.*{remedy}"):
        row_bounds({"pixel_values": torch.rand(5, 3)}, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("why", ["one row", "copies", "labels"])
def test_batches_without_negatives(name, why, caplog):
    """A finite loss attached to the graph, finite gradients, one warning with the reason."""
    words = [[1], [1]] if why == "copies" else [[1], [2]]
    labels = [7, 7] if why == "labels" else None
    b = 1 if why == "one row" else 2
    columns = 2 if "Negative" in name else 1
    words = [row + [20 + i] * (columns - 1) for i, row in enumerate(words)]
    batch = make_batch([2] * b, documents(b, columns), document_words=words[:b], labels=labels and labels[:b])
    loss = build(name)
    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        values = [loss(batch.features, batch.labels) for _ in range(3)]
    assert all(value.isfinite() for value in values)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(values[0], batch.leaves))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert f"{name}: no query has a negative in the batch" in messages[0]
    assert ("one row" if why == "one row" else "copies, share a label") in messages[0]


def test_tokens_that_are_not_unit_length_are_said_once(caplog):
    queries, positives = Tokens(torch.rand(3, 2, 4) + 1), Tokens(torch.rand(3, 2, 4) + 1)
    loss = build("ColbertLoss")
    for _ in range(2):
        loss.from_tokens(queries, [positives])
    assert [record.getMessage() for record in caplog.records if "not unit length" in record.getMessage()]
    assert len(caplog.records) == 1
    caplog.clear()
    unit = [Tokens(torch.nn.functional.normalize(t.vectors, dim=-1).bfloat16()) for t in (queries, positives)]
    build("ColbertLoss").from_tokens(unit[0], unit[1:])  # rounding to bfloat16 is no reason to warn
    build("ColbertLoss", norm_tol=100.0).from_tokens(queries, [positives])
    build("ColbertLoss", temperature=1.0, normalize_scores=False).from_tokens(queries, [positives])
    assert not caplog.records


def test_a_temperature_for_means_on_sums_is_said_once(caplog):
    batch = make_batch([2, 2], documents(2, 1))
    loss = build("ColbertLoss", normalize_scores=False)
    loss(batch.features)
    loss(batch.features)
    assert len(caplog.records) == 1
    assert "divides sums" in caplog.text


def test_columns_without_content_are_said_once(caplog):
    batch = make_batch([2, 2], documents(2, 1), document_words=[[1], [1]])
    for column in batch.features:
        del column["input_ids"]
    loss = build("ColbertLoss")
    with caplog.at_level(logging.INFO, "st_colbert_losses"):
        value = loss(batch.features)
        assert loss(batch.features) == value > 0  # the copy counts as a negative
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.INFO
    assert "neither token ids nor pixels" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_config_and_citation(name):
    loss = build(name)
    config = loss.get_config_dict()
    assert json.loads(json.dumps(config)) == config
    assert config["temperature"] == (1.0 if name == "ColbertPairwiseCELoss" else 0.02)
    assert config.get("in_batch_term_weight", 0.5) == 0.5
    for option, value in config.items():
        setattr(loss, option, value)  # every one is a hyperparameter that can be set
    assert loss.citation.count("@") >= 2
    assert f"{name}(" in repr(loss)
    assert "temperature=" in repr(loss)


@pytest.mark.parametrize("name", NAMES)
def test_changed_hyperparameters_take_effect(name):
    batch = make_batch([2, 2], documents(2, 2))
    loss = build(name)
    before = loss(batch.features)
    loss.temperature = 0.7
    assert loss(batch.features) != before
    assert loss(batch.features) == build(name, temperature=0.7)(batch.features)


def test_copies():
    batch = make_batch([2, 2], documents(2, 2))
    loss = build("ColbertSigmoidLoss", bias=0.2)
    value = loss(batch.features)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin(batch.features) == value
        twin.bias = 0.9
    assert loss(batch.features) == value


def test_import_needs_neither_world():
    """A fresh interpreter imports the package without PyLate and without sentence-transformers."""
    code = (
        "import sys; sys.modules['pylate'] = sys.modules['sentence_transformers'] = None\n"
        "import st_colbert_losses as s; print(len(s.__all__))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(output.stdout) == len(st_colbert_losses.__all__)


def test_data_parallel_is_refused():
    loss = ColbertLoss(torch.nn.DataParallel(Passthrough()))
    with pytest.raises(ValueError, match=r"ColbertLoss: got a model in DataParallel, .*accelerate launch"):
        loss(make_batch([2, 2], documents(2, 1)).features)
