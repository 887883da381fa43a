"""MaxSim against plain loops in float64: values, gradients, masks, dtypes, ties, and what it must live with."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import tempfile
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from st_colbert_losses import Tokens
from st_colbert_losses.maxsim import PackedTokens, maxsim, maxsim_own, use_kernels

TAU = 0.3


def loops(queries: list[Tensor], documents: list[Tensor], grad: Any, tau: float | None = None) -> Any:
    """Scores, and the gradients of ``sum(grad * scores)``, of lists of (tokens, D): the definition, token by token."""
    q, d = ([np.asarray(x.detach().double()) for x in side] for side in (queries, documents))
    scores = np.zeros((len(q), len(d)))
    of_q, of_d = ([np.zeros_like(x) for x in side] for side in (q, d))
    for b in range(len(q)):
        for c in range(len(d)):
            for i, token in enumerate(q[b]):
                similar = [sum(x * y for x, y in zip(token, other, strict=True)) for other in d[c]]
                if not similar:
                    continue
                top = max(similar)
                if tau is None:
                    scores[b, c] += top
                    share = [0.0] * len(similar)
                    share[similar.index(top)] = 1.0
                else:
                    parts = [math.exp((s - top) / tau) for s in similar]
                    scores[b, c] += tau * math.log(sum(parts)) + top
                    share = [part / sum(parts) for part in parts]
                for j, part in enumerate(share):
                    of_q[b][i] += float(grad[b, c]) * part * d[c][j]
                    of_d[c][j] += float(grad[b, c]) * part * token
    return scores, of_q, of_d


def rows(tokens: Tokens, vectors: Tensor | None = None) -> list[Tensor]:
    """The scored tokens of each row."""
    vectors = tokens.vectors if vectors is None else vectors
    return [row[mask] for row, mask in zip(vectors, tokens.mask, strict=True)]


def batch(n: int, t: int, d: int, *, holes: bool = False, dtype: torch.dtype = torch.float64) -> Tokens:
    mask = torch.rand(n, t) < 0.6 if holes else torch.ones(n, t, dtype=torch.bool)
    return Tokens(torch.randn(n, t, d, dtype=dtype).requires_grad_(), mask)


def check(
    scores: Tensor, grad: Tensor, queries: Tokens, documents: Tokens, tau: float | None, *, pick: Any = None
) -> None:
    """Compare scores and gradients with the loops, to 1e-12; ``pick`` takes each query's own scores from all."""
    full = grad
    if pick is not None:
        full = torch.zeros(len(queries), len(documents), dtype=grad.dtype)
        full[pick] = grad
    expected, of_q, of_d = loops(rows(queries), rows(documents), full, tau)
    torch.testing.assert_close(scores, torch.tensor(expected)[... if pick is None else pick], rtol=1e-12, atol=1e-12)
    scores.backward(grad)
    for tokens, of in ((queries, of_q), (documents, of_d)):
        if tokens.vectors.grad is None:
            continue
        wanted = torch.zeros_like(tokens.vectors)
        for row, mask, values in zip(wanted, tokens.mask, of, strict=True):
            row[mask] = torch.tensor(values)
        torch.testing.assert_close(tokens.vectors.grad, wanted, rtol=1e-12, atol=1e-12)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.integers(1, 5))


@settings(max_examples=40, deadline=None)
@given(shapes, st.booleans(), st.sampled_from([None, TAU]), st.integers(0, 2**31))
def test_in_batch_equals_the_loops(shape: tuple[int, ...], holes: bool, tau: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    b, c, q, t, d = shape
    queries, documents = batch(b, q, d, holes=holes), batch(c, t, d, holes=holes)
    check(maxsim(queries, documents, tau=tau), torch.randn(b, c, dtype=torch.float64), queries, documents, tau)


@settings(max_examples=40, deadline=None)
@given(shapes, st.booleans(), st.sampled_from([None, TAU]), st.integers(0, 2**31))
def test_own_documents_equal_the_loops(shape: tuple[int, ...], holes: bool, tau: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    b, n, q, t, d = shape
    queries, documents = batch(b, q, d, holes=holes), batch(b * n, t, d, holes=holes)
    own = (torch.arange(b)[:, None], torch.arange(b * n).view(b, n))
    check(
        maxsim_own(queries, documents, tau=tau),
        torch.randn(b, n, dtype=torch.float64),
        queries,
        documents,
        tau,
        pick=own,
    )


@settings(max_examples=40, deadline=None)
@given(shapes, st.booleans(), st.sampled_from([None, TAU]), st.integers(0, 2**31))
def test_packed_documents_equal_the_loops(
    shape: tuple[int, ...], shuffled: bool, tau: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    b, c, q, t, d = shape
    queries, lengths = batch(b, q, d, holes=True), torch.randint(0, t + 1, (c,))
    starts = None
    vectors = torch.randn(int(lengths.sum()), d, dtype=torch.float64)
    if shuffled:  # spans of a ring: any order, garbage between them
        order = torch.randperm(c)
        starts = torch.empty_like(lengths)
        starts[order] = (lengths[order] + 2).cumsum(0) - lengths[order]
        vectors = torch.full((int((lengths + 2).sum()), d), torch.nan, dtype=torch.float64)
        for start, length in zip(starts, lengths, strict=True):
            vectors[start : start + length] = torch.randn(int(length), d, dtype=torch.float64)
    places = lengths.cumsum(0) - lengths if starts is None else starts
    documents = [vectors[s : s + n] for s, n in zip(places, lengths, strict=True)]
    grad = torch.randn(b, c, dtype=torch.float64)
    scores = maxsim(queries, PackedTokens(vectors, lengths, starts), tau=tau)
    expected, of_q, _ = loops(rows(queries), documents, grad, tau)
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-12, atol=1e-12)
    scores.backward(grad)
    wanted = torch.zeros_like(queries.vectors)
    for row, mask, values in zip(wanted, queries.mask, of_q, strict=True):
        row[mask] = torch.tensor(values)
    torch.testing.assert_close(queries.vectors.grad, wanted, rtol=1e-12, atol=1e-12)


def dense(queries: Tokens, documents: Tokens, tau: float | None = None) -> Tensor:
    """All similarities at once, for the shapes where loops take too long."""
    q, d = (t.vectors.masked_fill(~t.mask[..., None], 0) for t in (queries, documents))
    similar = torch.einsum("bqd,ctd->bcqt", q, d).masked_fill(~documents.mask[:, None], -1e30)
    best = similar.amax(-1) if tau is None else tau * torch.logsumexp(similar / tau, -1)
    keep = queries.mask[:, None] & documents.mask.any(1)[:, None]
    return best.where(keep, 0).sum(-1)


def with_grads(function: Any, *tokens: Tokens, grad: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    scores = function(*tokens, **arguments)
    return (scores, *torch.autograd.grad(scores, [t.vectors for t in tokens], grad))


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize(("b", "c", "q", "t"), [(1100, 250, 2, 5), (9, 30, 40, 300), (300, 2, 3, 3500)])
def test_batches_of_many_tiles(b: int, c: int, q: int, t: int, tau: float | None) -> None:
    """More than one block of query tokens, tile of documents and chunk of the backward pass; B above 1024."""
    for holes in (False, True):
        queries, documents = batch(b, q, 4, holes=holes), batch(c, t, 4, holes=holes)
        grad = torch.randn(b, c, dtype=torch.float64)
        ours = with_grads(maxsim, queries, documents, grad=grad, tau=tau)
        for got, wanted in zip(ours, with_grads(dense, queries, documents, grad=grad, tau=tau), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_float32_errs_no_more_than_einsum(function: Any, tau: float | None) -> None:
    queries, documents = batch(8, 32, 48, dtype=torch.float32), batch(16, 90, 48, holes=True, dtype=torch.float32)
    own = (torch.arange(8)[:, None], torch.arange(16).view(8, 2))
    pick = own if function is maxsim_own else (...,)
    grad = torch.randn(8, 2 if function is maxsim_own else 16)

    def reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, d = (Tokens(t.vectors.detach().to(dtype).requires_grad_(), t.mask) for t in (queries, documents))
        return with_grads(lambda *x: dense(*x, tau=tau)[pick], q, d, grad=grad.to(dtype))

    ours = with_grads(function, queries, documents, grad=grad, tau=tau)
    for got, single, exact in zip(ours, reference(torch.float32), reference(torch.float64), strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).abs().max() <= 3 * (single - exact).abs().max() + 1e-6


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_half_precision_is_summed_in_float32(function: Any, dtype: torch.dtype, tau: float | None) -> None:
    queries, documents = batch(3, 5, 8, holes=True, dtype=dtype), batch(6, 7, 8, holes=True, dtype=dtype)
    n = 2 if function is maxsim_own else 6
    grad = torch.randn(3, n)
    pick = (torch.arange(3)[:, None], torch.arange(6).view(3, 2)) if function is maxsim_own else (...,)
    full = torch.zeros(3, 6)
    full[pick] = grad
    scores = function(queries, documents, tau=tau)
    scores.backward(grad)
    expected, of_q, of_d = loops(rows(queries), rows(documents), full, tau)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), torch.tensor(expected)[pick], rtol=1e-5, atol=1e-5)
    for tokens, of in ((queries, of_q), (documents, of_d)):
        assert tokens.vectors.grad.dtype == dtype
        got = torch.cat(rows(tokens, tokens.vectors.grad)).double()
        # One rounding to the dtype, of sums of a few terms around 1.
        torch.testing.assert_close(got, torch.tensor(np.concatenate(of)), rtol=torch.finfo(dtype).eps, atol=1e-4)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes (views are not made), in elements, and the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_packed_bfloat16_under_float32_queries() -> None:
    lengths = torch.randint(0, 90, (700,))
    store = torch.randn(int(lengths.sum()), 256).bfloat16()
    queries, grad = batch(3, 4, 256, dtype=torch.float32), torch.randn(3, 700)
    with Largest() as largest:
        scores = maxsim(queries, PackedTokens(store, lengths))
        (got,) = torch.autograd.grad(scores, queries.vectors, grad)
    assert largest.elements < store.numel() / 2  # a few documents at a time are cast to float32
    padded = Tokens(
        torch.nn.utils.rnn.pad_sequence(list(store.float().split(lengths.tolist())), batch_first=True),
        torch.arange(int(lengths.max())) < lengths[:, None],
    )
    wanted = dense(queries, padded)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, queries.vectors, grad)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masked_tokens_take_no_part(function: Any, tau: float | None, garbage: float, dtype: torch.dtype) -> None:
    """More padding, holes or empty rows, whatever lies there, change neither a score nor a gradient."""
    plain = [batch(4, 6, 8, holes=True, dtype=dtype), batch(8, 9, 8, holes=True, dtype=dtype)]
    plain[0].mask[0], plain[1].mask[3] = False, False  # a query, and a document of another query
    grad = torch.randn(4, 2 if function is maxsim_own else 8, dtype=torch.promote_types(dtype, torch.float32))
    dirty = []
    for tokens in plain:
        vectors = F.pad(tokens.vectors.detach(), (0, 0, 2, 5), value=garbage)
        mask = F.pad(tokens.mask, (2, 5))
        dirty.append(Tokens(vectors.masked_fill(~mask[..., None], garbage).requires_grad_(), mask))
    wanted = with_grads(function, *plain, grad=grad, tau=tau)
    got = with_grads(function, *dirty, grad=grad, tau=tau)
    assert wanted[0][0].eq(0).all()
    torch.testing.assert_close(got[0], wanted[0])
    for clean, padded in zip(wanted[1:], got[1:], strict=True):
        torch.testing.assert_close(padded[:, 2:-5], clean)
        assert padded[:, :2].eq(0).all()
        assert padded[:, -5:].eq(0).all()


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
@pytest.mark.parametrize(("b", "q", "c", "t"), [(2, 3, 4, 0), (2, 0, 4, 3), (0, 3, 0, 3), (2, 3, 4, 3)])
def test_nothing_to_score_is_zero_with_zero_gradient(
    function: Any, tau: float | None, b: int, q: int, c: int, t: int
) -> None:
    queries, documents = batch(b, q, 5), batch(c, t, 5)
    documents.mask[:] = False
    scores = function(queries, documents, tau=tau)
    assert scores.eq(0).all()
    scores.sum().backward()
    for tokens in (queries, documents):
        assert tokens.vectors.grad is not None
        assert tokens.vectors.grad.eq(0).all()


def test_padding_wins_no_maximum() -> None:
    query, document = Tokens(torch.rand(1, 3, 4) + 0.1), -torch.rand(1, 5, 4) - 0.1
    padded = F.pad(document, (0, 0, 0, 3))
    torch.testing.assert_close(maxsim(query, Tokens(padded)), maxsim(query, Tokens(document)))
    assert maxsim(query, Tokens(padded)).item() < 0


@pytest.mark.parametrize("function", [maxsim, maxsim_own])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_equal_tokens_the_first_scored_one_has_the_gradient(function: Any, dtype: torch.dtype) -> None:
    query = Tokens(torch.tensor([[[1.0, 0.0]]], dtype=dtype))
    vectors = torch.tensor([[[1.0, 9.0], [0.5, 0.0], [1.0, 0.0], [1.0, 5.0]]], dtype=dtype).requires_grad_()
    documents = Tokens(vectors, torch.tensor([[False, True, True, True]]))
    function(query, documents).backward()
    assert vectors.grad[0, :, 0].tolist() == [0, 0, 1, 0]


def test_all_query_tokens_on_one_document_token() -> None:
    queries, documents = batch(40, 30, 4), batch(3, 6, 4)
    with torch.no_grad():
        queries.vectors[..., 0] = 1
        documents.vectors[:, 4, 0] = 100
    maxsim(queries, documents).sum().backward()
    wanted = torch.zeros_like(documents.vectors)
    wanted[:, 4] = queries.vectors.detach().sum((0, 1))
    torch.testing.assert_close(documents.vectors.grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_gradcheck(function: Any, tau: float | None) -> None:
    queries, documents = batch(3, 4, 3, holes=True), batch(6, 5, 3, holes=True)
    torch.autograd.gradcheck(
        lambda q, d: function(Tokens(q, queries.mask), Tokens(d, documents.mask), tau=tau),
        (queries.vectors, documents.vectors),
    )


@pytest.mark.parametrize("tau", [None, TAU])
def test_gradients_of_gradients_are_refused(tau: float | None) -> None:
    queries, documents = batch(2, 3, 4), batch(2, 3, 4)
    (grad,) = torch.autograd.grad(
        maxsim(queries, documents, tau=tau).square().sum(), queries.vectors, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("holes", [False, True])
def test_no_operation_makes_the_similarity_tensor(tau: float | None, holes: bool) -> None:
    queries = batch(64, 16, 8, holes=holes, dtype=torch.float32)
    documents = batch(64, 128, 8, holes=holes, dtype=torch.float32)
    with Largest() as largest:
        maxsim(queries, documents, tau=tau).sum().backward()
    assert largest.elements < 64 * 64 * 16 * 128 / 8


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_a_side_that_needs_no_gradient_costs_none(function: Any, tau: float | None) -> None:
    queries, documents = batch(3, 4, 5, holes=True), batch(6, 7, 5, holes=True)
    frozen_queries = Tokens(queries.vectors.detach(), queries.mask)
    frozen_documents = Tokens(documents.vectors.detach(), documents.mask)
    scores = function(queries, documents, tau=tau)
    scores.sum().backward()
    with Largest() as both:
        function(queries, documents, tau=tau).sum().backward()
    with Largest() as of_queries:
        one = function(queries, frozen_documents, tau=tau)
        (grad,) = torch.autograd.grad(one.sum(), queries.vectors)
    with Largest() as of_documents:
        two = function(frozen_queries, documents, tau=tau)
        (other,) = torch.autograd.grad(two.sum(), documents.vectors)
    queries.vectors.grad, documents.vectors.grad = None, None
    scores = function(queries, documents, tau=tau)
    scores.sum().backward()
    torch.testing.assert_close(grad, queries.vectors.grad, rtol=0, atol=0)
    torch.testing.assert_close(other, documents.vectors.grad, rtol=0, atol=0)
    assert max(len(of_queries.names), len(of_documents.names)) < len(both.names)
    none = function(frozen_queries, frozen_documents, tau=tau)
    assert not none.requires_grad
    torch.testing.assert_close(none, scores.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile itself, at every graph break
@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_checkpoint_autocast_compile_and_repetition_change_nothing(function: Any, tau: float | None) -> None:
    queries = batch(4, 6, 8, holes=True, dtype=torch.float32)
    documents = batch(8, 9, 8, holes=True, dtype=torch.float32)
    grad = torch.randn(4, 2 if function is maxsim_own else 8)

    def plain(q: Tokens, d: Tokens) -> Tensor:
        return function(q, d, tau=tau)

    def rebuilt(q: Tensor, d: Tensor) -> Tensor:
        return plain(Tokens(q, queries.mask), Tokens(d, documents.mask))

    def checkpointed(q: Tokens, d: Tokens) -> Tensor:
        return checkpoint(rebuilt, q.vectors, d.vectors, use_reentrant=False)

    def under_autocast(q: Tokens, d: Tokens) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(q, d)

    def low_precision_products(q: Tokens, d: Tokens) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        scores = plain(q, d)
        torch.set_float32_matmul_precision(before)
        return scores

    compiled = torch.compile(lambda q, d: 2 * rebuilt(q * 1, d) / 2, backend="aot_eager")
    wanted = with_grads(plain, queries, documents, grad=grad)
    for way in (plain, checkpointed, under_autocast, lambda q, d: compiled(q.vectors, d.vectors)):
        for got, want in zip(with_grads(way, queries, documents, grad=grad), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    if function is maxsim:
        got = with_grads(low_precision_products, queries, documents, grad=grad)
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)


def test_backward_under_autocast_keeps_float32() -> None:
    queries, documents = batch(4, 6, 8, dtype=torch.float32), batch(8, 9, 8, dtype=torch.float32)
    wanted = with_grads(maxsim, queries, documents, grad=torch.ones(4, 8), tau=TAU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = with_grads(maxsim, queries, documents, grad=torch.ones(4, 8), tau=TAU)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("reason", ["off", "not built"])
def test_without_onednn_the_same(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = batch(4, 6, 8, dtype=torch.float32), batch(8, 9, 8, holes=True, dtype=torch.float32)
    wanted = with_grads(maxsim, queries, documents, grad=torch.ones(4, 8))
    if reason == "off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    else:
        monkeypatch.setattr(type(torch.backends.mkldnn), "is_available", lambda self: False)
    monkeypatch.setattr(torch, "mkldnn_convolution", None)
    got = with_grads(maxsim, queries, documents, grad=torch.ones(4, 8))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


VIEWS = {
    "cut": lambda x: x[..., :5],
    "strided": lambda x: x[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("tau", [None, TAU])
@pytest.mark.parametrize("function", [maxsim, maxsim_own])
@pytest.mark.parametrize("view", VIEWS)
def test_embeddings_need_not_be_contiguous(view: str, function: Any, tau: float | None) -> None:
    queries, documents = batch(3, 4, 10, dtype=torch.float32), batch(6, 7, 10, holes=True, dtype=torch.float32)
    grad = torch.randn(3, 2 if function is maxsim_own else 6)

    def viewed(q: Tokens, d: Tokens) -> Tensor:
        return function(*(Tokens(VIEWS[view](t.vectors), t.mask) for t in (q, d)), tau=tau)

    def copied(q: Tokens, d: Tokens) -> Tensor:
        copies = (VIEWS[view](t.vectors).clone(memory_format=torch.contiguous_format) for t in (q, d))
        return function(*(Tokens(copy, t.mask) for copy, t in zip(copies, (q, d), strict=True)), tau=tau)

    ways = (with_grads(way, queries, documents, grad=grad) for way in (viewed, copied))
    for got, wanted in zip(*ways, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_under_distributed_data_parallel() -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    try:
        encoder = torch.nn.Linear(8, 8)
        alone = copy.deepcopy(encoder)
        wrapped = torch.nn.parallel.DistributedDataParallel(encoder)
        queries, documents = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
        for model in (alone, wrapped):
            maxsim(Tokens(model(queries)), Tokens(model(documents))).logsumexp(1).sum().backward()
        torch.testing.assert_close(encoder.weight.grad, alone.weight.grad, rtol=0, atol=0)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("vectors", "arguments", "match"),
    [
        (torch.randn(2, 3, 4), {"lengths": torch.tensor([3])}, "Use Tokens"),
        (torch.ones(3, 4, dtype=torch.int64), {"lengths": torch.tensor([3])}, "floating point"),
        (torch.randn(3, 4), {"lengths": torch.tensor(3)}, "one start per document"),
        (torch.randn(3, 4), {"lengths": torch.tensor([1, 2]), "starts": torch.tensor([0])}, "one start per document"),
        (torch.randn(3, 4), {"lengths": torch.tensor([2, 2])}, "outside of the 3 rows"),
        (torch.randn(3, 4), {"lengths": torch.tensor([-1])}, "outside"),
        (torch.randn(3, 4), {"lengths": torch.tensor([1]), "starts": torch.tensor([-1])}, "outside"),
    ],
)
def test_packed_tokens_say_what_is_wrong(vectors: Tensor, arguments: dict[str, Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=f"PackedTokens: got.*{match}"):
        PackedTokens(vectors, **arguments)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The kernels' package as it would be called on a GPU, played by loops on the CPU; returns its calls."""
    calls = []

    def fake(q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor, *, backward: str) -> Tensor:
        calls.append({"shape": tuple(d.shape), "backward": backward})
        if d.ndim == 4:  # each query's own documents
            rows = zip(q[:, None], d, q_mask[:, None], d_mask, strict=True)
            return torch.cat([fake(*row, backward=backward) for row in rows])
        similar = torch.einsum("bqd,ctd->bcqt", q, d).float().masked_fill(~d_mask[:, None], -torch.inf)
        return similar.amax(-1).masked_fill(~q_mask[:, None], 0).sum(-1)

    package = types.ModuleType("late_interaction_kernels")
    package.maxsim = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", package)
    monkeypatch.setattr("st_colbert_losses.maxsim.kernels._installed", lambda: True)
    monkeypatch.setattr("st_colbert_losses.maxsim.kernels._on_tensor_cores", lambda tensor: True)
    return calls


@pytest.mark.parametrize("function", [maxsim, maxsim_own])
def test_kernels_take_over_and_agree(function: Any, kernels: list[dict[str, Any]]) -> None:
    queries, documents = (
        batch(3, 5, 16, holes=True, dtype=torch.bfloat16),
        batch(6, 7, 16, holes=True, dtype=torch.bfloat16),
    )
    queries.mask[1], documents.mask[4] = False, False
    with torch.no_grad():  # what is masked may be anything
        for tokens in (queries, documents):
            tokens.vectors[~tokens.mask] = torch.nan
    grad = torch.randn(3, 2 if function is maxsim_own else 6)
    by_kernels = with_grads(function, queries, documents, grad=grad)
    assert kernels[0] == {"shape": (6, 7, 16) if function is maxsim else (3, 2, 7, 16), "backward": "unified"}
    use_kernels(False)
    count = len(kernels)
    try:
        by_tiles = with_grads(function, queries, documents, grad=grad)
    finally:
        use_kernels(True)
    assert len(kernels) == count
    for got, wanted in zip(by_kernels, by_tiles, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-5)  # the stand-in rounds products to bfloat16


def test_kernels_leave_to_the_tiles_what_they_would_round(kernels: list[dict[str, Any]]) -> None:
    half, single = torch.bfloat16, torch.float32
    maxsim(batch(2, 3, 16, dtype=single), batch(4, 5, 16, dtype=single))
    maxsim(batch(2, 3, 16, dtype=half), batch(4, 5, 16, dtype=single))
    maxsim(batch(2, 3, 16, dtype=half), batch(4, 5, 16, dtype=half), tau=TAU)
    maxsim(batch(2, 3, 16, dtype=half), PackedTokens(torch.randn(9, 16).to(half), torch.tensor([4, 5])))
    maxsim(batch(2, 3, 8, dtype=half), batch(4, 5, 8, dtype=half))
    maxsim_own(batch(2, 3, 16, dtype=half), batch(4, 5, 16, dtype=half), tau=TAU)
    assert not kernels
    torch.use_deterministic_algorithms(True)
    try:
        maxsim(batch(2, 3, 16, dtype=half), batch(4, 5, 16, dtype=half))
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels == [{"shape": (4, 5, 16), "backward": "lowmem"}]


def test_without_a_gpu_or_the_package_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from st_colbert_losses.maxsim import kernels

    tokens = batch(2, 3, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    assert kernels.kernel_scores(tokens, tokens, own=False) is None
    monkeypatch.setattr(kernels, "_on_tensor_cores", lambda tensor: True)
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert kernels.kernel_scores(tokens, tokens, own=False) is None


def test_the_real_package_means_the_same() -> None:
    """Without a GPU: that its signature is the one called, and its reference agrees."""
    import late_interaction_kernels as package
    from late_interaction_kernels import reference

    assert list(inspect.signature(package.maxsim).parameters) == [
        "Q",
        "D",
        "q_mask",
        "d_mask",
        "normalize",
        "backward",
    ]
    queries, documents = batch(3, 5, 16, holes=True), batch(6, 7, 16, holes=True)
    scores = reference.maxsim_reference(queries.vectors, documents.vectors, queries.mask, documents.mask)
    torch.testing.assert_close(maxsim(queries, documents), scores, rtol=1e-12, atol=1e-12)
