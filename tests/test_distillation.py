"""Distillation: plain loops, the peers' losses, PyLate's flattened column, bad labels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from st_colbert_losses import (
    CachedColbertDistillationLoss,
    ColbertDistillationLoss,
    ColbertLoss,
    LateInteractionLoss,
    MoCoColbertDistillationLoss,
    Tokens,
)
from st_colbert_losses.objectives import distillation
from tests import reference
from tests.batches import Passthrough, make_batch
from tests.models import PYLATE, assert_same_gradients, columns, gradients, tiny_model

TEACHER = torch.tensor([[9.0, 3.0, 5.0], [0.2, 0.9, 0.1], [-4.0, -4.0, -4.0]])

OBJECTIVE = {"teacher_temperature": 1.0, "normalize_teacher_scores": True, "contrastive_weight": 0.0}


def check(batch, teacher, **options) -> None:
    for row, scores in zip(batch.rows, teacher.tolist(), strict=True):
        row.teacher = scores
    value = ColbertDistillationLoss(Passthrough(), **options)(batch.features, teacher)
    options = {"temperature": 1.0, "normalize_scores": False, **options}
    expected = reference.loss("ColbertDistillationLoss", batch.rows, **options)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad(value, batch.leaves)
    want = torch.autograd.grad(expected + sum(0 * leaf.sum() for leaf in batch.leaves), batch.leaves)
    largest = max(1e-3, *(float(w.abs().max()) for w in want))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"teacher_temperature": 0.3},
        {"normalize_teacher_scores": False, "teacher_temperature": 2.0},
        {"normalize_scores": True, "temperature": 0.05},
        {"contrastive_weight": 0.4},
        {"contrastive_weight": 1.0, "temperature": 0.3},
        {"contrastive_weight": 0.4, "pos_aware_negative_filtering": True, "filter_mode": "mask"},
        {"contrastive_weight": 0.4, "matryoshka_dims": [3, 2], "use_smooth_max": True},
    ],
    ids=str,
)
def test_options(options):
    """A copy of the positive stays among the scored documents, an empty one is none; one teacher is undecided."""
    words = [[1, 2, 1], [3, 4, 5], [1, 6, 7]]
    check(make_batch([3, 2, 1], [[3, 2, 1], [2, 0, 4], [1, 2, 2]], document_words=words), TEACHER, **options)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    b, per_row = data.draw(st.integers(1, 3)), [1, *data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))]
    n = sum(per_row)
    lengths = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    batch = make_batch(
        data.draw(st.lists(st.integers(0, 3), min_size=b, max_size=b)),
        data.draw(st.lists(lengths, min_size=b, max_size=b)),
        per_row=per_row,
    )
    teacher = torch.tensor(
        data.draw(
            st.lists(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 20.0]), min_size=n, max_size=n), min_size=b, max_size=b)
        )
    )
    check(
        batch,
        teacher,
        temperature=data.draw(st.sampled_from([0.1, 1.0])),
        teacher_temperature=data.draw(st.sampled_from([0.1, 1.0])),
        normalize_teacher_scores=data.draw(st.booleans()),
        normalize_scores=data.draw(st.booleans()),
        contrastive_weight=data.draw(st.sampled_from([0.0, 0.5])),
    )


def test_no_warning_of_negatives_that_no_term_asks_for(caplog):
    ColbertDistillationLoss(Passthrough())(make_batch([2, 2], [[2, 2]] * 2).features, TEACHER[:2, :2])
    assert not caplog.records


def test_contrastive_alone_is_infonce():
    batch = make_batch([3, 2, 1], [[3, 2, 1], [2, 1, 4], [1, 2, 2]])
    ours = ColbertDistillationLoss(Passthrough(), contrastive_weight=1.0, temperature=0.1, normalize_scores=True)
    value, expected = ours(batch.features, TEACHER), ColbertLoss(Passthrough(), temperature=0.1)(batch.features)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)


def test_one_column_with_all_documents_of_a_row():
    """PyLate's flattened column, from features and from tokens, in training and in evaluation."""
    batch = make_batch([3, 2, 1], [[3, 2, 1], [2, 1, 4], [1, 2, 2]])
    loss = ColbertDistillationLoss(Passthrough(), temperature=0.3)
    apart = loss(batch.features, TEACHER)
    width = max(f["vectors"].shape[1] for f in batch.features[1:])

    def flat(key):
        parts = [f[key] for f in batch.features[1:]]
        if key in ("vectors", "scored"):
            padding = [(0, 0) * (part.ndim - 2) + (0, width - part.shape[1]) for part in parts]
            parts = [torch.nn.functional.pad(part, pad) for part, pad in zip(parts, padding, strict=True)]
        return torch.stack(parts, 1).flatten(0, 1)

    joined = {key: flat(key) for key in batch.features[1]}
    torch.testing.assert_close(loss([batch.features[0], joined], TEACHER), apart, rtol=1e-13, atol=1e-13)
    queries = Tokens(batch.features[0]["vectors"], batch.features[0]["scored"])
    tokens = [Tokens(joined["vectors"], joined["scored"])]
    torch.testing.assert_close(loss.from_tokens(queries, tokens, TEACHER), apart, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "labels",
    [None, torch.ones(3), torch.ones(3, 2), torch.ones(3, 3, dtype=torch.bool), torch.full((3, 3), torch.nan), [1.0]],
    ids=["none", "one per row", "one missing", "bool", "nan", "list"],
)
def test_bad_teacher_scores(labels):
    batch = make_batch([1, 1, 1], [[1, 1, 1]] * 3)
    with pytest.raises(ValueError, match=r"ColbertDistillationLoss: got .*expected a teacher's scores, \(3, 3\)"):
        ColbertDistillationLoss(Passthrough())(batch.features, labels)


def test_what_are_no_tokens():
    """Said as by the other losses, before anything is read of them."""
    tokens = Tokens(torch.rand(1, 3, 4))
    says = "ColbertDistillationLoss: got queries of type .* and documents .*, expected Tokens and a list of Tokens"
    for queries, documents in ((tokens, tokens), (tokens, (t for t in [tokens])), (tokens, None), (None, [tokens])):
        with pytest.raises(ValueError, match=says):
            ColbertDistillationLoss(Passthrough()).from_tokens(queries, documents)


def test_the_objective_alone_asks_for_a_teacher():
    loss = LateInteractionLoss(Passthrough(), partial(distillation, **OBJECTIVE), explicit_negatives=True)
    says = "distillation: got no teacher's scores, expected one per document of a row. Use ColbertDistillationLoss"
    with pytest.raises(ValueError, match=says):
        loss(make_batch([1, 1], [[1, 1]] * 2).features)


def test_other_losses_name_this_one():
    batch = make_batch([1, 1, 1], [[1, 1, 1]] * 3)
    with pytest.raises(ValueError, match="ColbertDistillationLoss"):
        ColbertLoss(Passthrough())(batch.features, TEACHER)


def test_one_document_per_row_is_refused():
    batch = make_batch([1, 1, 1], [[1]] * 3)
    with pytest.raises(ValueError, match="got 2 column"):
        ColbertDistillationLoss(Passthrough())(batch.features, TEACHER[:, :1])


QUERIES = ["what sings", "what eats red fish", "one blue two"]
DOCUMENTS = [
    ["bird sings , sings", "the red cat eats fish .", "three blue dog two one"],
    ["dog", "blue fish", "ten"],
    ["seven eight nine ten one two", "bird sleeps", "dog eats red , blue , green fish ."],
]
FLOAT32_VALUE, FLOAT32_GRADIENT = 1e-6, 1e-5  # as in test_parity.py


def test_parity():
    """PyLate's Distillation and sentence-transformers' MultiVectorDistillKLDivLoss, where they say the same."""
    model = tiny_model()
    features = columns(model, QUERIES, *DOCUMENTS)
    options = {"normalize_teacher_scores": False}
    if PYLATE:
        from pylate.losses import Distillation

        rows = [text for row in zip(*DOCUMENTS, strict=True) for text in row]
        flattened = columns(model, QUERIES, rows)
        for masked in encoded_maxima(model, flattened):
            assert masked > 0  # PyLate lets masked tokens score 0, which must not win
        theirs = Distillation(model, normalize_scores=False)([dict(f) for f in flattened], TEACHER)
        mine = ColbertDistillationLoss(model, **options)(flattened, TEACHER)
    else:
        from sentence_transformers.multi_vector_encoder.losses import MultiVectorDistillKLDivLoss

        peer = MultiVectorDistillKLDivLoss(model, teacher_temperature=0.5)
        theirs = peer([dict(f) for f in features], TEACHER)
        mine = ColbertDistillationLoss(model, teacher_temperature=0.5, **options)(features, TEACHER)
    torch.testing.assert_close(mine, theirs, rtol=FLOAT32_VALUE, atol=FLOAT32_VALUE)
    assert_same_gradients(gradients(mine, model), gradients(theirs, model), FLOAT32_GRADIENT)


def encoded_maxima(model, features) -> list[float]:
    with torch.no_grad():
        q, d = (torch.nn.functional.normalize(model(dict(f))["token_embeddings"], dim=-1) for f in features)
    return [float((a @ b.T).max(1).values.min()) for a in q for b in d]


@pytest.mark.parametrize("contrastive_weight", [0.0, 0.5])
def test_cached_equals_direct(contrastive_weight):
    model = tiny_model().double()
    features = columns(model, QUERIES, *DOCUMENTS)
    options = {"contrastive_weight": contrastive_weight, "temperature": 0.7}
    direct = gradients(ColbertDistillationLoss(model, **options)(features, TEACHER), model)
    for size in (1, 2):
        model.zero_grad()
        CachedColbertDistillationLoss(model, mini_batch_size=size, **options)(features, TEACHER).backward()
        cached = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same_gradients(cached, direct, 1e-8)


def test_queue_serves_the_contrastive_term(caplog):
    torch.manual_seed(0)
    first, second = (make_batch([2, 2, 1], [[2, 1, 2], [1, 2, 2], [2, 2, 1]]) for _ in range(2))
    for batch in (first, second):
        for row, scores in zip(batch.rows, TEACHER.tolist(), strict=True):
            row.teacher = scores
    options = {"contrastive_weight": 0.5, "temperature": 0.4, "normalize_scores": True}
    moco = MoCoColbertDistillationLoss(Passthrough(), momentum=None, queue_size=3, **options)
    moco(first.features, TEACHER)
    queued = [reference.QueuedDocument(r.documents[0].detach(), r.document_ids[0]) for r in first.rows]
    value = moco(second.features, TEACHER)
    expected = reference.loss("ColbertDistillationLoss", second.rows, queued, **options)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    MoCoColbertDistillationLoss(Passthrough(), momentum=None)(first.features, TEACHER)
    assert "the queue is not used" in caplog.text
