"""Gradient caching: the direct form's values and gradients in the memory of a mini-batch."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import st_colbert_losses
from st_colbert_losses import ColbertLoss
from st_colbert_losses.features import row_bounds, select_rows
from st_colbert_losses.mini_batches import _plan
from tests.encoder import Encoder, batch
from tests.models import PYLATE, tiny_model
from tests.test_losses import NAMES

TEXTS = ["red cat", "blue dog sings", "one fish eats two bird", "six", "three dog sleeps", "red cat", "nine ten"]


def columns(model: nn.Module, negatives: int = 1, rows: int = 7) -> list[dict]:
    """Queries, positives and negatives of ragged lengths, tokenised as the trainer's collator does it."""
    texts = [TEXTS[:rows], *([t + " what" for t in TEXTS[i : rows + i]] for i in range(negatives + 1))]
    texts[1:] = [column + TEXTS[: rows - len(column)] for column in texts[1:]]
    if PYLATE:
        return [model.tokenize(column, is_query=i == 0, pad=True) for i, column in enumerate(texts)]
    return [model.preprocess(column, task="document" if i else "query") for i, column in enumerate(texts)]


def gradients(loss: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    loss.zero_grad()
    value.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in loss.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor], tolerance: float) -> None:
    largest = max(float(g.abs().max()) for g in first)
    assert largest > 1e-3  # a comparison of zeros says nothing
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mini_batch",
    [{"mini_batch_size": n} for n in (1, 2, 3, 7, 50)] + [{"mini_batch_num_tokens": n} for n in (1, 9, 20)],
)
def test_equals_direct(name, mini_batch):
    """Through the world's own model in float64: ragged rows, sorted and trimmed, any cut."""
    model = tiny_model().double()
    features, labels = columns(model), torch.tensor([0, 1, 2, 3, 4, 5, 1])
    direct = getattr(st_colbert_losses, name)(model, temperature=0.2)
    cached = getattr(st_colbert_losses, f"Cached{name}")(model, temperature=0.2, **mini_batch)
    first, second = direct(features, labels), cached(features, labels)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
    assert_same(gradients(direct, first), gradients(cached, second), 1e-8)


@pytest.mark.parametrize("expansion", [True, False])
def test_scored_positions_without_attention_survive_the_cut(expansion):
    """Query expansion: positions with attention 0 are scored, so a short query's must not be cut off."""
    model = tiny_model(expansion=expansion).double()
    features = columns(model)
    if not PYLATE:  # what the tokeniser module marks when query expansion is on
        attended = features[0]["attention_mask"]
        features[0]["query_expansion_positions"] = (1 - attended) * int(expansion)
    assert not features[0]["attention_mask"].all()
    direct, cached = ColbertLoss(model), st_colbert_losses.CachedColbertLoss(model, mini_batch_size=2)
    assert_same(gradients(direct, direct(features)), gradients(cached, cached(features)), 1e-8)


@pytest.mark.parametrize("name", ["CachedColbertLoss", "MoCoColbertLoss"])
def test_backward_that_would_leave_mini_batches_out_is_refused(name):
    loss = getattr(st_colbert_losses, name)(Encoder().double(), mini_batch_size=3)
    features, parameters = batch(), list(loss.model.parameters())
    with pytest.raises(RuntimeError, match=r"got torch.autograd.grad .* expected loss.backward\(\)"):
        torch.autograd.grad(loss(features), parameters)
    with pytest.raises(RuntimeError, match=r"backward\(inputs=...\)"):
        loss(features).backward(inputs=parameters)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss(features).backward(create_graph=True)
    value = loss(features)
    value.backward(retain_graph=True)
    assert all(p.grad.abs().sum() > 0 for p in parameters)


def test_left_padding():
    model = tiny_model().double()
    features = columns(model)
    for column in features:
        for key in ("input_ids", "attention_mask", "token_type_ids"):
            column[key] = column[key].flip(1)
    direct, cached = ColbertLoss(model), st_colbert_losses.CachedColbertLoss(model, mini_batch_size=2)
    assert_same(gradients(direct, direct(features)), gradients(cached, cached(features)), 1e-8)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # torch's, in eager reentrant mode
def test_encoder_with_gradient_checkpointing(reentrant):
    model = tiny_model().train()
    features = columns(model)
    cached = st_colbert_losses.CachedColbertLoss(model, temperature=0.2, mini_batch_size=3)
    before = gradients(cached, cached(features))
    encoder = model[0].auto_model
    encoder.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        encoder.enable_input_require_grads()
    # float32, another order of the same sums
    assert_same(before, gradients(cached, cached(features)), 1e-5)


def test_dropout_in_one_mini_batch_is_the_direct_form():
    model = tiny_model(dropout=0.3).train()
    features = columns(model)
    direct, cached = ColbertLoss(model), st_colbert_losses.CachedColbertLoss(model, mini_batch_size=7)
    results = []
    for loss in (direct, cached):
        torch.manual_seed(4)
        value = loss(features)
        results.append([value, *gradients(loss, value)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_replay_draws_the_same_dropout():
    """Bit for bit, in every mini-batch, and the random generator goes on as if nothing had been replayed."""
    encoder = Encoder(dropout=0.5).train()
    value = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)(batch())
    first, state = list(encoder.seen), torch.get_rng_state()
    encoder.seen.clear()
    value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(first) == 12
    for a, b in zip(
        first[:-1], reversed(encoder.seen), strict=True
    ):  # the first is replayed last, the last not at all
        assert torch.equal(a, b)


def test_scale_accumulation_and_two_forwards():
    encoder, one, two = Encoder().double(), batch(), batch()
    direct, cached = ColbertLoss(encoder), st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)

    def combine(loss):
        """Two forwards, scaled, one backward."""
        return 0.3 * loss(one) + 7 * loss(two) ** 2

    expected = gradients(direct, combine(direct))
    assert_same(expected, gradients(cached, combine(cached)), 1e-8)

    def accumulated(loss):
        loss.zero_grad()
        for features in (one, two):
            (loss(features) / 2).backward()
        return [p.grad.clone() for p in loss.parameters()]

    assert_same(accumulated(direct), accumulated(cached), 1e-8)


def test_backward_twice():
    encoder, features = Encoder().double(), batch()
    cached = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)
    value = cached(features)
    value.backward(retain_graph=True)
    once = [p.grad.clone() for p in encoder.parameters()]
    assert_same(once, gradients(cached, value), 1e-12)


def test_modules_that_edit_their_features():
    """Edits of the dict and of its tensors stay inside one pass; the trainer's features are as they were."""

    class Edits(Encoder):
        def forward(self, features):
            features["attention_mask"][:, :1] = 0  # in place, and again in the replay
            output = super().forward(features)
            features["input_ids"] = features["input_ids"] + 1
            features["attention_mask"] = None
            features["note"] = "seen"
            return output

    encoder, features = Edits().double(), batch()
    before = [{key: value.clone() for key, value in column.items()} for column in features]
    direct = ColbertLoss(encoder)
    expected = gradients(direct, direct(features))
    for size in (2, 7):
        cached = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=size)
        assert_same(expected, gradients(cached, cached(features)), 1e-8)
    for column, old in zip(features, before, strict=True):
        assert column.keys() == old.keys()
        assert all(torch.equal(column[key], old[key]) for key in old)


def test_modules_that_change_the_number_of_tokens():
    class Shortens(Encoder):
        def forward(self, features):
            output = super().forward(features)
            longest = int(output["attention_mask"].sum(1).max())  # another width in every mini-batch
            return {key: value[:, :longest] for key, value in output.items()}

    encoder, features = Shortens().double(), batch()
    direct, cached = ColbertLoss(encoder), st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=1)
    assert_same(gradients(direct, direct(features)), gradients(cached, cached(features)), 1e-8)


def test_markers_and_strings_are_passed_on():
    class Reads(Encoder):
        def forward(self, features):
            assert features["task"] == "query-like"
            assert features["flags"] == ["a", "b"]
            assert features["scale"].ndim == 0
            return super().forward(features)

    encoder, features = Reads().double(), batch()
    for column in features:
        column |= {"task": "query-like", "flags": ["a", "b"], "scale": torch.tensor(2.0)}
    direct, cached = ColbertLoss(encoder), st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)
    assert_same(gradients(direct, direct(features)), gradients(cached, cached(features)), 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_nothing(name, monkeypatch):
    """Without gradients: the training value, no snapshot of a random generator, no hook, no graph."""
    encoder, features = Encoder().eval(), batch()
    cached = getattr(st_colbert_losses, f"Cached{name}")(encoder, mini_batch_size=2)
    expected = cached(features).detach()
    encoder.seen.clear()

    def refuse(*_):
        raise RuntimeError("a snapshot in evaluation")

    monkeypatch.setattr(torch, "get_rng_state", refuse)
    with torch.no_grad():
        value = cached(features)
    assert torch.equal(value, expected)
    assert not value.requires_grad
    assert value.grad_fn is None
    assert not value._backward_hooks


def test_memory_of_a_batch_is_gone_after_its_step():
    encoder, features = Encoder(), batch()
    cached = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)
    value = cached(features)
    held = [weakref.ref(tensor) for column in features for tensor in column.values()] + [weakref.ref(value)]
    value.backward()
    del value, features
    encoder.seen.clear()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_activations_are_not_kept():
    """Between the passes a mini-batch holds its embeddings, not what its layers computed."""
    alive = []

    class Watched(Encoder):
        def forward(self, features):
            hidden = torch.tanh(self.embedding(features["input_ids"]))
            alive.append(weakref.ref(hidden))
            return super().forward(features) | {"extra": hidden.sum()}

    encoder, features = Watched(), batch()
    value = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)(features)
    gc.collect()
    assert len(alive) == 12
    assert [ref() for ref in alive[:-1]] == [None] * 11  # the last keeps its own, as it is the first in backward
    value.backward()


def test_replay_runs_under_the_autocast_of_the_first_pass():
    """Backward stands outside the autocast block, as in a plain loop; both passes compute in bfloat16."""
    dtypes = []

    class Watched(Encoder):
        def forward(self, features):
            dtypes.append((self.linear(torch.rand(1, 6)).dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(features)

    encoder, features = Watched(), batch()
    direct, cached = ColbertLoss(encoder), st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)
    results = []
    for loss in (direct, cached):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(features)
        results.append(gradients(loss, value))
    assert len(dtypes) == 3 + 12 + 11
    assert set(dtypes) == {(torch.bfloat16, True)}
    # Sums of bfloat16 products over other groups of rows: a few units of its rounding, 2^-8.
    assert_same(results[0], results[1], 2e-2)


def test_compiled_models_stay_compiled_in_the_replay():
    """`aot_eager` traces forward and backward as a real backend does; `eager` hides a replay on the bare model."""
    torch._dynamo.reset()
    encoder, features = Encoder().double(), batch()
    plain = ColbertLoss(encoder)
    expected = gradients(plain, plain(features))

    class Compiled(Encoder):
        def forward(self, features):
            compiling.append(torch.compiler.is_compiling())
            return super().forward(features)

    compiling: list[bool] = []
    twin = Compiled().double()
    twin.load_state_dict(encoder.state_dict())
    compiled = torch.compile(twin, backend="aot_eager", dynamic=True)
    cached = st_colbert_losses.CachedColbertLoss(compiled, mini_batch_size=2)
    calls = []
    twin_forward, compiled.forward = compiled.forward, lambda *a, **k: (calls.append(1), twin_forward(*a, **k))[1]
    assert_same(expected, gradients(cached, cached(features)), 1e-8)
    assert len(calls) == 23  # 12 mini-batches and 11 replays, all through the compiled module


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.none() | st.integers(1, 5),
    budget=st.none() | st.integers(1, 30),
)
def test_plan(lengths, size, budget):
    """Every row once, the longest mini-batch last, within the budget unless a row alone is beyond it."""
    plan = _plan(lengths, size, budget)
    assert sorted(i for chosen in plan for i in chosen) == list(range(len(lengths)))
    flat = [lengths[i] for chosen in reversed(plan) for i in chosen]
    assert flat == sorted(lengths, reverse=True)
    for chosen in plan:
        longest = max(lengths[i] for i in chosen)
        if budget is not None:
            assert len(chosen) == 1 or len(chosen) * longest <= budget
        elif size is not None:
            assert len(chosen) <= size


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 2), min_size=1, max_size=5), data=st.data())
def test_images_without_a_batch_axis_are_cut_by_row(counts, data):
    """Patches of several images a row, or none, one after the other: each row keeps exactly its own."""
    grid, patches, owners = [], [], []
    for row, count in enumerate(counts):
        for _ in range(count):
            shape = [1, *data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))]
            grid.append(shape)
            patches += [len(patches)] * (shape[1] * shape[2])
            owners += [row] * (shape[1] * shape[2])
    features = {
        "input_ids": torch.arange(len(counts))[:, None],
        "attention_mask": torch.ones(len(counts), 1),
        "pixel_values": torch.tensor(owners, dtype=torch.float)[:, None].repeat(1, 2),
        "image_grid_thw": torch.tensor(grid, dtype=torch.long).view(-1, 3),
        "num_images_per_sample": torch.tensor(counts),
    }
    chosen = data.draw(st.permutations(range(len(counts))))[: data.draw(st.integers(1, len(counts)))]
    part = select_rows(features, row_bounds(features, len(counts)), chosen, 1)
    expected = [row for row in chosen for owner in owners if owner == row]
    if expected:
        assert part["pixel_values"][:, 0].tolist() == expected
        assert int(part["image_grid_thw"].prod(-1).sum()) == len(expected)
        assert len(part["image_grid_thw"]) == int(part["num_images_per_sample"].sum())
    else:
        assert "pixel_values" not in part
        assert "image_grid_thw" not in part


def test_images_per_sample_without_a_grid():
    features = {
        "input_ids": torch.arange(4)[:, None],
        "pixel_values": torch.arange(4.0)[:, None],  # four images for four rows, but not one each
        "num_images_per_sample": torch.tensor([1, 0, 2, 1]),
    }
    part = select_rows(features, row_bounds(features, 4), [2, 0], 1)
    assert part["pixel_values"][:, 0].tolist() == [1, 2, 0]
    with_mask = features | {"pixel_attention_mask": torch.ones(4, 1)}  # padded per row: one entry each
    part = select_rows(with_mask, row_bounds(with_mask, 4), [2, 0], 1)
    assert part["pixel_values"][:, 0].tolist() == [2, 0]


@pytest.mark.parametrize(
    "extra",
    [
        {"pixel_values": torch.rand(9, 2)},
        {"pixel_values": torch.rand(9, 2), "image_grid_thw": torch.ones(3, 3, dtype=torch.long)},
        {"position_ids": torch.zeros(3, 7, 5)},
        {"cu_seq_lens_q": torch.arange(8)},
    ],
    ids=lambda extra: ",".join(extra),
)
def test_what_cannot_be_cut_is_refused(extra):
    features = batch(columns=2)
    features[1] |= extra
    with pytest.raises(ValueError, match=r"Features: got '.*' of shape .* for 7 rows, expected one entry per row"):
        st_colbert_losses.CachedColbertLoss(Encoder(), mini_batch_size=2)(features)


def test_features_without_tensors_are_refused():
    with pytest.raises(ValueError, match="expected a tensor with one entry per row"):
        st_colbert_losses.CachedColbertLoss(Encoder(), mini_batch_size=2)([{"text": ["a"]}, {"text": ["b"]}])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["mini_batch_size", "mini_batch_num_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_invalid_sizes(name, option, value):
    with pytest.raises(ValueError, match=f"Cached{name}: got {option}={value}, expected a whole number from 1"):
        getattr(st_colbert_losses, f"Cached{name}")(Encoder(), **{option: value})


def test_frozen_models_are_refused_where_gradients_are_wanted():
    encoder, features = Encoder().requires_grad_(False), batch()
    cached = st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)
    with pytest.raises(ValueError, match=r"CachedColbertLoss: got a model none of whose 3 parameters .*is_trainable"):
        cached(features)
    with torch.no_grad():
        assert cached(features).isfinite()


def test_inputs_that_need_gradients_get_them():
    class Direct(nn.Module):
        def forward(self, features):
            return {"token_embeddings": features["vectors"] * 2, "attention_mask": features["attention_mask"]}

    features = [{"vectors": torch.rand(4, 3, 2).double().requires_grad_(), "attention_mask": torch.ones(4, 3)}] * 2
    leaf = features[0]["vectors"]
    direct = ColbertLoss(Direct(), normalize_scores=False, temperature=1.0)
    cached = st_colbert_losses.CachedColbertLoss(Direct(), normalize_scores=False, temperature=1.0, mini_batch_size=1)
    results = []
    for loss in (direct, cached):
        leaf.grad = None
        loss(features).backward()
        results.append([leaf.grad.clone()])
    assert_same(*results, 1e-8)


class Zero:
    """The part of a DeepSpeed engine that tells its ZeRO stage."""

    def __init__(self, stage):
        self.stage = stage

    def zero_optimization_stage(self):
        return self.stage


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_zero_is_refused(stage):
    class DeepSpeedEngine(Zero, nn.Module):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module, self.stage = module, stage

    cached = st_colbert_losses.CachedColbertLoss(DeepSpeedEngine(Encoder()), mini_batch_size=2)
    with pytest.raises(ValueError, match=f"CachedColbertLoss: got a DeepSpeed model with ZeRO stage {stage}"):
        cached(batch())


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ddp_settings_that_cannot_work_are_refused():
    ddp = nn.parallel.DistributedDataParallel
    with pytest.raises(ValueError, match="static_graph=True, expected False"):
        st_colbert_losses.CachedColbertLoss(ddp(Encoder(), static_graph=True), mini_batch_size=2)(batch())
    buffered = Encoder()
    buffered.register_buffer("positions", torch.arange(3))
    with pytest.raises(ValueError, match="broadcast_buffers=True, expected False"):
        st_colbert_losses.CachedColbertLoss(ddp(buffered), mini_batch_size=2)(batch())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("compiled", [None, "inside", "outside"])
def test_ddp(compiled):
    """One process: the replay inside backward is no step of its own, and the gradients are the direct form's."""
    encoder, features = Encoder().double(), batch()
    direct = ColbertLoss(encoder)
    expected = gradients(direct, direct(features))
    inner = torch.compile(encoder, backend="aot_eager", dynamic=True) if compiled == "inside" else encoder
    model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
    if compiled == "outside":
        model = torch.compile(model, backend="aot_eager", dynamic=True)
    cached = st_colbert_losses.CachedColbertLoss(model, mini_batch_size=2)
    for _ in range(2):
        assert_same(expected, gradients(cached, cached(features)), 1e-8)


def test_a_mini_batch_as_large_as_the_batch_is_said_once(caplog):
    cached = st_colbert_losses.CachedColbertLoss(Encoder())  # 32 rows at once, of 7
    for _ in range(2):
        cached(batch())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "mini-batch of 32 holds the whole batch of 7 rows" in caplog.text


def test_progress_bar(capsys):
    encoder = Encoder()
    st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2)(batch())
    assert "/12" not in capsys.readouterr().err
    st_colbert_losses.CachedColbertLoss(encoder, mini_batch_size=2, show_progress_bar=True)(batch())
    assert "0/12" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_config(name):
    cached = getattr(st_colbert_losses, f"Cached{name}")(Encoder(), mini_batch_num_tokens=9)
    assert cached.get_config_dict()["mini_batch_size"] == 32
    assert cached.get_config_dict()["mini_batch_num_tokens"] == 9
    assert "mini_batch_size" not in getattr(st_colbert_losses, name)(Encoder()).get_config_dict()
    cached.mini_batch_num_tokens, cached.mini_batch_size = None, 3  # takes effect at the next step
    cached.model.seen.clear()
    cached(batch())
    assert [len(vectors) for vectors in cached.model.seen[:3]] == [1, 3, 3]
