"""Every objective, option and mask against plain loops in float64: values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import st_colbert_losses
from st_colbert_losses import Tokens
from tests import reference
from tests.batches import Batch, Passthrough, make_batch

NAMES = [
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertPairwiseCELoss",
    "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
]


BOTH_WAYS = {"ColbertLoss", "ColbertNegativeCELoss"}


def build(name, **options):
    return getattr(st_colbert_losses, name)(Passthrough(), **options)


def check(name: str, batch: Batch, **options) -> None:
    """The loss and the gradient of every column equal the reference to the rounding of float64."""
    loss = build(name, **options)
    value = loss(batch.features, batch.labels)
    expected = reference.loss(name, batch.rows, **{"temperature": loss.temperature, **options})
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad(value, batch.leaves)
    want = torch.autograd.grad(expected + sum(0 * leaf.sum() for leaf in batch.leaves), batch.leaves)
    largest = max(1e-3, *(float(w.abs().max()) for w in want))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10 * largest)


def documents(rows: int, columns: int, *lengths: int) -> list[list[int]]:
    cycle = lengths or (3, 2, 4, 1)
    return [[cycle[(i * columns + n) % len(cycle)] for n in range(columns)] for i in range(rows)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 0.3, "normalize_scores": False},
        {"temperature": 0.3, "use_smooth_max": True},
        {"temperature": 0.3, "use_smooth_max": True, "tau": 0.5, "normalize_scores": False},
        {"temperature": 0.3, "pos_aware_negative_filtering": True},
        {
            "temperature": 0.3,
            "pos_aware_negative_filtering": True,
            "filter_threshold": 0.5,
            "filter_factor": 0.0,
        },
        {"temperature": 0.3, "pos_aware_negative_filtering": True, "filter_threshold": 0.2, "filter_factor": 1.0},
        {"temperature": 0.3, "mask_duplicate_documents": False},
        {"temperature": 0.3, "pos_aware_negative_filtering": True, "filter_mode": "mask", "filter_threshold": 0.5},
        {
            "temperature": 0.3,
            "pos_aware_negative_filtering": True,
            "filter_margin": 0.4,
            "filter_explicit": True,
        },
        {"temperature": 0.3, "matryoshka_dims": [3, 2], "matryoshka_weights": [1.0, 0.5]},
        {"temperature": 0.3, "matryoshka_dims": (2,)},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "defaults",
)
def test_options(name, options):
    words = [[1, 2, 3], [1, 4, 1], [5, 5, 6], [7, 8, 9]]
    batch = make_batch([3, 2, 4, 1], documents(4, 3), document_words=words, padding=2, holes=True)
    check(name, batch, **options)


@pytest.mark.parametrize("name", ["ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_in_batch_term_weight(name, weight):
    check(name, make_batch([3, 2, 2], documents(3, 2)), temperature=0.2, in_batch_term_weight=weight)


@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertNegativeCELoss"])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_both_ways(name, weight):
    """Equal queries, copies, an empty query and an empty positive are nobody's negatives the other way round too."""
    batch = make_batch(
        [3, 2, 0, 2, 1],
        documents(5, 2, 3, 2, 0, 1),
        query_words=[1, 2, 3, 1, 4],
        document_words=[[1, 2], [3, 4], [5, 6], [7, 8], [3, 9]],
        labels=[0, 1, 2, 3, 2],
    )
    check(name, batch, temperature=0.2, document_to_query_weight=weight)


@pytest.mark.parametrize("bias", [-0.5, 0.0, 0.4])
def test_bias(bias):
    check("ColbertSigmoidLoss", make_batch([3, 2, 2], documents(3, 2)), temperature=0.2, bias=bias)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_batch(name, data):
    """Ragged lengths, empty rows, extra padding, holes, one row, duplicates, equal queries, labels, n per row."""
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    b = data.draw(st.integers(1, 4), label="rows")
    per_row = [1, *data.draw(st.lists(st.integers(1, 2), min_size=name in reference.EXPLICIT, max_size=2))]
    n = sum(per_row)

    def draw_rows(numbers):
        return st.lists(numbers, min_size=b, max_size=b)

    batch = make_batch(
        data.draw(draw_rows(st.integers(0, 3)), label="query lengths"),
        data.draw(draw_rows(st.lists(st.integers(0, 3), min_size=n, max_size=n)), label="document lengths"),
        query_words=data.draw(draw_rows(st.integers(1, 4)), label="queries"),
        document_words=data.draw(draw_rows(st.lists(st.integers(1, 8), min_size=n, max_size=n)), label="documents"),
        labels=data.draw(st.none() | draw_rows(st.integers(0, 2)), label="labels"),
        padding=data.draw(st.integers(0, 2), label="padding"),
        holes=data.draw(st.booleans(), label="holes"),
        per_row=per_row,
    )
    check(
        name,
        batch,
        temperature=data.draw(st.sampled_from([0.1, 0.5, 1.0]), label="temperature"),
        normalize_scores=data.draw(st.booleans()),
        use_smooth_max=data.draw(st.booleans()),
        pos_aware_negative_filtering=data.draw(st.booleans()),
        filter_threshold=data.draw(st.sampled_from([0.3, 0.95])),
        mask_duplicate_documents=data.draw(st.booleans()),
        filter_mode=data.draw(st.sampled_from(["damp", "mask"])),
        filter_margin=data.draw(st.sampled_from([None, 0.05, 0.3])),
        filter_explicit=data.draw(st.booleans()),
        matryoshka_dims=data.draw(st.sampled_from([None, [3], [2, 3], [3, 2, 1]])),
        **({"document_to_query_weight": data.draw(st.sampled_from([0.0, 0.5]))} if name in BOTH_WAYS else {}),
    )


@pytest.mark.parametrize("name", NAMES)
def test_more_padding_changes_nothing(name):
    """Garbage in masked positions, and any number of them, moves neither the loss nor a gradient by a bit."""
    torch.manual_seed(3)
    narrow = make_batch([3, 2], documents(2, 2))
    wide = [dict(column) for column in narrow.features]
    leaves = []
    for column in wide:
        garbage = torch.full((len(column["vectors"]), 5, 3), math.nan, dtype=torch.float64)
        column["vectors"] = torch.cat([column["vectors"].detach(), garbage], 1).requires_grad_()
        column["scored"] = torch.cat([column["scored"], torch.zeros(len(garbage), 5, dtype=torch.bool)], 1)
        leaves.append(column["vectors"])
    loss = build(name)
    first, second = loss(narrow.features), loss(wide)
    # Shapes change the order of sums inside a matrix product: equal to rounding, not to the bit.
    torch.testing.assert_close(first, second, rtol=1e-13, atol=1e-13)
    for a, b in zip(torch.autograd.grad(first, narrow.leaves), torch.autograd.grad(second, leaves), strict=True):
        torch.testing.assert_close(b[:, : a.shape[1]], a, rtol=1e-12, atol=1e-12)
        assert not b[:, a.shape[1] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_lower_precision(name, dtype):
    """Half-precision embeddings are summed in float32: the loss is that of the rounded embeddings in float64."""
    batch = make_batch([3, 2, 4], documents(3, 2), dtype=dtype)
    value = build(name)(batch.features)
    assert value.dtype == torch.float32
    expected = reference.loss(name, batch.rows, temperature=build(name).temperature)
    # A rounding of a score in float32 (6e-8) is divided by the temperature, 0.02.
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient in torch.autograd.grad(value, batch.leaves):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


def test_more_than_1024_rows():
    b, t = 1030, 0.05
    vectors = reference.unit(2, b, 1, 4)
    queries, positives = Tokens(vectors[0]), Tokens(vectors[1])
    similarity = (vectors[0, :, 0] @ vectors[1, :, 0].T).numpy() / t
    from numpy import diag, exp, log

    expected = (log(exp(similarity).sum(1)) - diag(similarity)).mean()
    loss = build("ColbertLoss", temperature=t).from_tokens(queries, [positives])
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_direction(name):
    """Raising a positive's similarity lowers every loss; raising that of a negative that counts raises it."""
    b = 3
    similarities = torch.rand(b, 2 * b, dtype=torch.float64)  # queries by (positives, negatives)

    def loss(matrix: torch.Tensor) -> float:
        queries = Tokens(torch.eye(b, dtype=torch.float64)[:, None])  # query i reads row i of the matrix
        documents = [Tokens(part.T[:, None]) for part in matrix.split(b, 1)]
        return build(name, temperature=0.5).from_tokens(queries, documents).item()

    before = loss(similarities)
    rows, columns = torch.meshgrid(torch.arange(b), torch.arange(2 * b), indexing="ij")
    pool = rows != columns
    if name in reference.EXPLICIT:
        pool = (columns < b) & pool
    counts = pool
    if "Pairwise" in name:  # the hardest alone
        masked = similarities.masked_fill(~pool, -1)
        counts = masked == masked.max(1, keepdim=True).values
    if name in reference.EXPLICIT:
        counts = counts | (columns == rows + b)
    for row, column in zip(rows.flatten(), columns.flatten(), strict=True):
        raised = similarities.clone()
        raised[row, column] += 1e-3
        change = loss(raised) - before
        if row == column:
            assert change < -1e-6
        elif counts[row, column]:
            assert change > 1e-6
        else:
            assert abs(change) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_any_temperature_is_finite(name):
    """Finite unit-length embeddings and temperatures from 1e-4 never give NaN, neither do sums over many tokens."""
    batch = make_batch([3, 2, 0], [[3, 2], [0, 1], [2, 0]], dtype=torch.float32)
    for temperature in (1e-4, 0.02, 1.0, 100.0):
        for normalize in (True, False):
            loss = build(name, temperature=temperature, normalize_scores=normalize)(batch.features)
            gradients = torch.autograd.grad(loss, batch.leaves)
            assert loss.isfinite()
            assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_empty_query_and_positive_score_zero_with_zero_gradient(name):
    batch = make_batch([0, 2], [[2, 2], [0, 2]], padding=1)
    gradients = torch.autograd.grad(build(name, temperature=0.5)(batch.features), batch.leaves)
    assert not gradients[0][0].any()
    assert not gradients[1][1].any()
    check(name, batch, temperature=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_missing_negatives_may_be_empty_rows(name):
    """Rows padded with empty documents to the same number of negatives have the loss of the rows without them."""
    torch.manual_seed(5)
    few = make_batch([2, 2], [[2, 3], [3, 1]])
    more = [*few.features, *(dict(few.features[1]) for _ in range(3))]
    for column in more[3:]:
        column["scored"] = torch.zeros_like(column["scored"])
    loss = build(name)
    torch.testing.assert_close(loss(more), loss(few.features), rtol=1e-13, atol=1e-13)


def test_several_negatives_in_one_column_or_in_several():
    torch.manual_seed(5)
    batch = make_batch([2, 3], [[2, 3, 3], [3, 3, 3]])
    merged = {
        key: torch.stack([batch.features[2][key], batch.features[3][key]], 1).flatten(0, 1)
        for key in batch.features[2]
    }
    for name in NAMES:
        loss = build(name)
        apart, together = loss(batch.features), loss([*batch.features[:2], merged])
        torch.testing.assert_close(apart, together, rtol=1e-13, atol=1e-13)


def test_pool_is_query_major():
    """Candidate j * N + n is the n-th document of row j, whatever columns they came in."""
    seen = {}

    def spy(scores, temperature):
        seen["pool"] = scores.pool
        return scores.positive

    eye = torch.eye(6)
    documents = [Tokens(eye[[0, 1], None]), Tokens(eye[[2, 3, 4, 5], None])]  # one positive, two negatives per row
    queries = Tokens(torch.arange(1.0, 7.0).expand(2, 1, 6))
    loss = st_colbert_losses.LateInteractionLoss(Passthrough(), spy, normalize_scores=False, temperature=1.0)
    loss.from_tokens(queries, documents)
    inf = -torch.inf
    assert seen["pool"].tolist() == [[inf, 3, 4, 2, 5, 6], [1, 3, 4, inf, 5, 6]]


@pytest.mark.parametrize("vectors", [[[1.0]], None, torch.rand(2, 3), torch.ones(2, 3, 4, dtype=torch.long)])
def test_tokens_of_what_are_none(vectors):
    says = r"^Tokens: got vectors of .*, expected a floating point tensor \(N, T, D\).* Pass "
    with pytest.raises(ValueError, match=says):
        Tokens(vectors)
    with pytest.raises(ValueError, match=says):
        build("MoCoColbertLoss").queue.enqueue(vectors)


@pytest.mark.parametrize("mask", [[[True] * 3] * 2, torch.ones(2, 4), True])
def test_tokens_with_what_is_no_mask(mask):
    says = r"^Tokens: got a mask of .*, expected a tensor of shape \(2, 3\), as the vectors have. Pass "
    with pytest.raises(ValueError, match=says):
        Tokens(torch.rand(2, 3, 4), mask)
