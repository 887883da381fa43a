"""The MoCo forms step by step against plain loops: losses, gradients, the momentum encoder, the queue, resuming."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import sys
import weakref

import pytest
import torch
import transformers  # noqa: F401 - only then is the stack looked through
from torch import nn

import st_colbert_losses
from st_colbert_losses import MoCoColbertLoss
from tests import reference
from tests.encoder import Encoder, batch
from tests.test_losses import NAMES


def build(name: str, model: nn.Module, **options):
    return getattr(st_colbert_losses, f"MoCo{name}")(model, **options)


def ids_of(column: dict) -> list[tuple[int, ...]]:
    return [
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(column["input_ids"], column["attention_mask"], strict=True)
    ]


def tokens_of(model: nn.Module, column: dict) -> list[torch.Tensor]:
    output = model(dict(column))
    return [v[m] for v, m in zip(output["token_embeddings"], output["attention_mask"], strict=True)]


def rows_of(
    features: list[dict], encoded: list[list[torch.Tensor]], labels: torch.Tensor | None
) -> list[reference.Row]:
    ids = [ids_of(column) for column in features]
    return [
        reference.Row(
            query=encoded[0][i],
            documents=[column[i] for column in encoded[1:]],
            query_ids=ids[0][i],
            document_ids=[column[i] for column in ids[1:]],
            label=None if labels is None else int(labels[i]),
        )
        for i in range(len(encoded[0]))
    ]


class Simulation:
    """MoCo in plain Python: a list of documents, a dict of averaged weights, one step at a time."""

    def __init__(self, name: str, model: nn.Module, *, queue_size: int, momentum: float | None, **options) -> None:
        self.name, self.model, self.options = name, model, options
        self.size, self.momentum = queue_size, momentum
        self.twin = copy.deepcopy(model).eval()
        self.queue: list[reference.QueuedDocument] = []

    def loss(self, features, labels, *, temperature, live_documents=True, enqueue_negatives=False, score_queue=True):
        encoded = [tokens_of(self.model, column) for column in features]
        with torch.no_grad():
            keys = [tokens_of(self.twin, column) for column in features[1:]]
        if self.momentum is None:
            keys = [[t.detach() for t in column] for column in encoded[1:]]
        if not live_documents:
            encoded = [encoded[0], *keys]
        rows = rows_of(features, encoded, labels)
        queue = self.queue if score_queue else []
        value = reference.loss(self.name, rows, queue, temperature=temperature, **self.options)
        for column, its in list(zip(features[1:], keys, strict=True))[: None if enqueue_negatives else 1]:
            for i, (tokens, ids) in enumerate(zip(its, ids_of(column), strict=True)):
                self.queue.append(reference.QueuedDocument(tokens, ids, None if labels is None else int(labels[i])))
        self.queue = self.queue[-self.size :]
        return value

    def after_step(self) -> None:
        if self.momentum is None:
            return
        for key, live in zip(self.twin.parameters(), self.model.parameters(), strict=True):
            key.data = self.momentum * key.data + (1 - self.momentum) * live.data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.3, "queue_size": 5},
        {"momentum": None},
        {"momentum": 0.5, "live_documents": False},
        {"enqueue_negatives": True, "queue_size": 9},
        {"warmup_steps": 2},
        {"mini_batch_size": 2},
        {"mini_batch_num_tokens": 7, "live_documents": False},
        {"pos_aware_negative_filtering": True},
        {"use_smooth_max": True, "queue_size": 6},
        {"mask_duplicate_documents": False},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "defaults",
)
def test_steps(name, options):
    """Five steps with an optimizer: value, gradient, weights of the momentum encoder and the queue's order."""
    torch.manual_seed(1)
    encoder = Encoder().double()
    settings = {"queue_size": 8, "momentum": 0.9, "temperature": 0.3, **options}
    loss = build(name, encoder, **settings)
    shared = {"queue_size": settings["queue_size"], "momentum": settings["momentum"]}
    rules = ("pos_aware_negative_filtering", "use_smooth_max", "mask_duplicate_documents")
    simulation = Simulation(name, encoder, **shared, **{k: v for k, v in options.items() if k in rules})
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    earlier = None
    for step in range(5):
        features, labels = batch(rows=3, columns=3), torch.tensor([step % 2, 2 + step, 9])
        if earlier is not None:  # a document of the last batch comes again, as a positive
            features[1] = {key: torch.cat([earlier[key][:1], value[1:]]) for key, value in features[1].items()}
        earlier = features[1]
        value = loss(features, labels)
        expected = simulation.loss(
            features,
            labels,
            temperature=0.3,
            live_documents=options.get("live_documents", True),
            enqueue_negatives=options.get("enqueue_negatives", False),
            score_queue=step >= options.get("warmup_steps", 0),
        )
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        want = torch.autograd.grad(expected, list(encoder.parameters()))
        optimizer.zero_grad()
        value.backward()
        largest = max(float(g.abs().max()) for g in want)
        for parameter, gradient in zip(encoder.parameters(), want, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-9 * largest)
        assert len(loss.queue) == len(simulation.queue)
        optimizer.step()
        simulation.after_step()
        if settings["momentum"] is not None:
            for mine, theirs in zip(loss.momentum_model.parameters(), simulation.twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
                assert not mine.requires_grad
    stored = loss.queue.state()
    torch.testing.assert_close(
        stored["vectors"], torch.cat([d.tokens for d in simulation.queue]), rtol=1e-9, atol=1e-12
    )
    assert stored["lengths"].tolist() == [len(d.tokens) for d in simulation.queue]
    assert stored["labels"].tolist() == [d.label for d in simulation.queue]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_queue_is_the_direct_loss(name):
    encoder, features = Encoder().double(), batch()
    direct = getattr(st_colbert_losses, name)(encoder)
    for options in ({}, {"queue_size": 7}, {"mini_batch_size": 2}, {"momentum": None}):
        moco = build(name, encoder, **options)
        assert len(moco.queue) == 0
        torch.testing.assert_close(moco(features), direct(features), rtol=1e-14, atol=0)
        assert len(moco.queue) == 7


def test_evaluation_changes_nothing():
    encoder = Encoder()
    moco, direct = MoCoColbertLoss(encoder, queue_size=4), st_colbert_losses.ColbertLoss(encoder)
    moco(batch())
    before = moco.queue.state()
    features = batch()
    with torch.no_grad():
        assert moco(features) == direct(features)
    encoder.eval()
    assert moco(features) == direct(features)
    encoder.train()
    assert len(moco.queue) == 4
    after = moco.queue.state()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_two_forwards_before_a_backward():
    """The store is not overwritten under a backward pass that is still to come."""
    encoder = Encoder().double()
    one, two = batch(rows=4), batch(rows=4)
    values, gradients = [], []
    for together in (True, False):
        torch.manual_seed(2)
        moco = MoCoColbertLoss(encoder, queue_size=4, temperature=0.3)
        moco(batch(rows=4))
        encoder.zero_grad()
        if together:
            first, second = moco(one), moco(two)
            (first + second).backward()
        else:
            first = moco(one)
            first.backward()
            second = moco(two)
            second.backward()
        values.append((first.item(), second.item()))
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    assert values[0] == values[1]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_without_the_mask_copies_in_the_queue_harm():
    """Thirty epochs of eight pairs, a queue of 64: every positive has copies in it. Masked, they cost nothing."""
    queries = torch.arange(8)[:, None] * 2 + torch.arange(2)
    positives = 20 + torch.arange(8)[:, None] * 3 + torch.arange(3)
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (queries, positives)]
    final = {True: 0.0, False: 0.0}
    for masked in final:
        for seed in range(3):
            torch.manual_seed(seed)
            encoder = Encoder()
            moco = MoCoColbertLoss(
                encoder, queue_size=64, momentum=0.5, temperature=0.05, mask_duplicate_documents=masked
            )
            optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.02)
            for rows in torch.cat([torch.randperm(8) for _ in range(30)]).split(4):
                optimizer.zero_grad()
                moco([{key: value[rows] for key, value in column.items()} for column in data]).backward()
                optimizer.step()
            final[masked] += st_colbert_losses.ColbertLoss(encoder.eval(), temperature=0.05)(data).item()
    assert final[True] < 0.6 * final[False]  # 0.53 against 1.37 when this was written


def test_a_fixed_pool_of_chosen_negatives():
    encoder, features = Encoder().double(), batch(rows=3, columns=2)
    moco = MoCoColbertLoss(encoder, queue_size=10, enqueue_batches=False, temperature=0.3, momentum=None)
    chosen = batch(rows=4, columns=2)[1]
    with torch.no_grad():
        output = encoder(dict(chosen))
    moco.queue.enqueue(output["token_embeddings"], output["attention_mask"], features=chosen)
    expected = reference.loss(
        "ColbertLoss",
        rows_of(features, [tokens_of(encoder, column) for column in features], None),
        [reference.QueuedDocument(t, ids) for t, ids in zip(tokens_of(encoder, chosen), ids_of(chosen), strict=True)],
        temperature=0.3,
    )
    for _ in range(2):
        torch.testing.assert_close(moco(features), expected, rtol=1e-10, atol=0)
        assert len(moco.queue) == 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("queue_size", value) for value in (0, 1.5, True)),
        *(("momentum", value) for value in (1.0, -0.1, float("nan"))),
        ("queue_dtype", "bfloat16"),
        ("queue_dtype", torch.int8),
        ("warmup_steps", -1),
        ("mini_batch_size", 0),
        ("live_documents", 1),
        ("enqueue_batches", None),
    ],
)
def test_invalid_options(option, value):
    with pytest.raises(ValueError, match=f"MoCoColbertLoss: got {option}="):
        MoCoColbertLoss(Encoder(), **{option: value})


def test_unknown_options_and_what_stays_as_it_was_made():
    with pytest.raises(TypeError, match="quue_size"):
        MoCoColbertLoss(Encoder(), quue_size=3)
    with pytest.raises(ValueError, match="momentum=None with live_documents=False"):
        MoCoColbertLoss(Encoder(), momentum=None, live_documents=False)
    moco = MoCoColbertLoss(Encoder(), momentum=None)
    with pytest.raises(ValueError, match="momentum=None with live_documents=False"):
        moco.live_documents = False
    for option, value in (("queue_size", 5), ("queue_dtype", torch.float16), ("momentum", 0.9)):
        with pytest.raises(ValueError, match=f"got {option}=.* after construction"):
            setattr(moco, option, value)
    moving = MoCoColbertLoss(Encoder())
    moving.momentum = 0.5
    with pytest.raises(ValueError, match="after construction"):
        moving.momentum = None
    for option in ("queue", "momentum_model"):
        with pytest.raises(ValueError, match=f"got an assignment to {option}, expected it to stay"):
            setattr(moving, option, Encoder())
    assert {id(p) for p in moving.parameters()} == {id(p) for p in moving.model.parameters()}


@pytest.mark.parametrize("name", ["queue", "momentum_model"])
def test_other_forms_have_none(name):
    loss = st_colbert_losses.CachedColbertLoss(Encoder())
    assert not hasattr(loss, name)
    with pytest.raises(AttributeError, match=f"CachedColbertLoss: has no {name}, .* such as MoCoColbertLoss"):
        getattr(loss, name)


def test_deepspeed_is_refused():
    class DeepSpeedEngine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def zero_optimization_stage(self):
            return 1

    moco = MoCoColbertLoss(Encoder())
    moco.model = DeepSpeedEngine(moco.model)
    with pytest.raises(ValueError, match="ZeRO stage 1, expected no ZeRO"):
        moco(batch())


def test_config():
    config = MoCoColbertLoss(Encoder(), queue_dtype=torch.bfloat16, mini_batch_size=4).get_config_dict()
    assert json.loads(json.dumps(config)) == config
    assert config["queue_size"] == 1024
    assert config["momentum"] == 0.99
    assert config["queue_dtype"] == "bfloat16"
    assert config["mini_batch_size"] == 4


def test_state_dict_goes_on_bit_for_bit():
    """Three steps, saved and loaded into a fresh loss, equal six steps in one go."""

    def run(steps: int, state=None) -> tuple[nn.Module, dict]:
        torch.manual_seed(0)
        moco = MoCoColbertLoss(Encoder(), queue_size=8, momentum=0.8, warmup_steps=2)
        optimizer = torch.optim.SGD(moco.parameters(), lr=0.3)
        start = 0
        if state is not None:
            moco.load_state_dict(state)
            start = 3
        for step in range(start, steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            moco(batch(rows=3)).backward()
            optimizer.step()
        return moco, copy.deepcopy(moco.state_dict())

    _, half = run(3)
    whole, resumed = run(6)[1], run(6, half)[1]
    for key, value in whole.items():
        if not key.endswith("_extra_state"):
            assert torch.equal(value, resumed[key])
    assert whole["_extra_state"] == resumed["_extra_state"] == {"steps": 6, "starts": {}}
    mine, theirs = whole["memory._extra_state"], resumed["memory._extra_state"]
    for part in ("queue", "momentum_model"):
        assert all(torch.equal(mine[part][key], theirs[part][key]) for key in mine[part])


def test_copies_have_memories_of_their_own():
    moco = MoCoColbertLoss(Encoder(), momentum=0.5)
    moco(batch())
    for twin in (copy.deepcopy(moco), pickle.loads(pickle.dumps(moco))):
        assert len(twin.queue) == 7
        twin.queue.clear()
        optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
        twin(batch()).backward()
        optimizer.step()
        assert twin.steps == 1
    assert len(moco.queue) == 7
    assert moco.steps == 0


def test_losses_are_collected():
    """Looking for a Trainer up the stack keeps nobody's locals alive."""
    assert "transformers" in sys.modules
    moco = MoCoColbertLoss(Encoder())
    moco(batch()).backward()
    gone = weakref.ref(moco)
    del moco
    gc.collect()
    assert gone() is None


def test_a_queue_that_outlives_an_epoch_is_said_once(caplog):
    encoder, data = Encoder(), batch(rows=4, columns=2)
    moco = MoCoColbertLoss(encoder, queue_size=16)
    with caplog.at_level(logging.WARNING, "st_colbert_losses"):
        moco(data)
        moco(batch(rows=4, columns=2))
        assert not caplog.records
        for _ in range(8):
            moco(data)
    assert [
        record.getMessage().startswith("DocumentQueue: its 16 documents outlive") for record in caplog.records
    ] == [True]
