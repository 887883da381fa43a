"""How each kind of model is encoded: which tokens are scored, normalised by whom; wrappers change nothing."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import st_colbert_losses
from st_colbert_losses import ColbertLoss, ColbertNegativeCELoss, ColbertPairwiseCELoss, Tokens
from st_colbert_losses.encoding import embed
from tests.models import PYLATE, assert_same_gradients, columns, encoded, gradients, tiny_model

QUERIES = ["what sings", "what eats red fish", "one blue two"]
POSITIVES = ["bird sings , sings", "the red cat eats fish .", "three blue dog two one"]
NEGATIVES = ["dog", "seven eight nine ten one two", "bird sleeps"]

# The same float32 computation in another batch or at another width: BERT's sums run in another order.
VALUE, GRADIENT = 1e-6, 1e-5

# What torch.compile says of the libraries' code, not ours.
through_compile = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


class Plain(nn.Module):
    """Any module: a table of token vectors that need not be unit length, scored by the mask it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": self.table(features["input_ids"]), "attention_mask": features["attention_mask"]}


def plain_columns(*lengths: list[int], first: int = 1) -> list[dict[str, Tensor]]:
    """One column per list: rows of so many attended ids, all different, padded with the id 0."""
    features, ids = [], iter(range(first, 50))
    for column in lengths:
        rows = [torch.tensor([next(ids) for _ in range(length)]) for length in column]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        features.append({"input_ids": padded, "attention_mask": (padded > 0).long()})
    return features


def pad(features: dict[str, Any], extra: int) -> dict[str, Any]:
    """The same inputs with more padding on the right, under ids that would matter if they were attended."""
    padded = {name: F.pad(t, (0, extra)) if isinstance(t, Tensor) else t for name, t in features.items()}
    return {**padded, "input_ids": F.pad(features["input_ids"], (0, extra), value=7)}


def scored_tokens(model: nn.Module, features: dict[str, Any], *, is_query: bool) -> list[Tensor]:
    tokens = embed(model, features, is_query)
    return [vectors[mask] for vectors, mask in zip(tokens.vectors.detach(), tokens.mask, strict=True)]


def not_unit(vectors: Tensor) -> bool:
    return float((vectors.detach().norm(dim=-1) - 1).abs().max()) > 0.1


def assert_same_loss(
    loss: ColbertLoss, features: list[dict], other: ColbertLoss, other_features: list[dict], model: nn.Module
) -> None:
    """Two losses over the weights of one model, wrapped or not."""
    expected, actual = other(other_features), loss(features)
    torch.testing.assert_close(actual, expected, rtol=VALUE, atol=VALUE)
    assert_same_gradients(gradients(actual, model), gradients(expected, model), GRADIENT)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Any module


def test_plain_module_is_scored_as_it_is() -> None:
    """Not normalised, and by the mask that it returns."""
    model, features = Plain(), plain_columns([3, 2], [4, 1], [2, 2])
    loss = ColbertNegativeCELoss(model, temperature=1.0)
    tokens = [Tokens(model.table(f["input_ids"]), f["attention_mask"]) for f in features]
    assert not_unit(tokens[0].vectors)
    expected = loss.from_tokens(tokens[0], tokens[1:])
    torch.testing.assert_close(loss(features), expected, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_more_padding_changes_nothing_plain(wide: int) -> None:
    model, features = Plain(), plain_columns([3, 2], [4, 1], [2, 2])
    wider = [pad(f, 5) if i == wide else f for i, f in enumerate(features)]
    loss = ColbertLoss(model, temperature=1.0, use_smooth_max=True)
    assert_same_loss(loss, wider, loss, features, model)


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (torch.zeros(2, 3, 4), "Tensor"),
        (None, "NoneType"),
        ((torch.zeros(2, 3, 4), torch.ones(2, 3)), "tuple"),
        ({"token_embeddings": torch.zeros(2, 3, 4)}, "'token_embeddings'"),
        ({"sentence_embedding": torch.zeros(2, 4)}, "'sentence_embedding'"),
    ],
)
def test_a_module_that_returns_something_else(output: Any, got: str) -> None:
    class Wrong(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> Any:
            return output

    with pytest.raises(ValueError, match=r"Wrong: got .*expected a dict with 'token_embeddings'") as error:
        ColbertLoss(Wrong())(plain_columns([3, 3], [3, 3]))
    assert got in str(error.value).split("expected")[0]
    assert "MultiVectorEncoder" in str(error.value)  # the remedy


def test_a_module_whose_mask_does_not_fit() -> None:
    class Wrong(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"token_embeddings": torch.zeros(2, 3, 4), "attention_mask": torch.ones(2, 5)}

    with pytest.raises(ValueError, match=r"mask of shape \(2, 5\).*expected a tensor of shape \(2, 3\)"):
        ColbertLoss(Wrong())(plain_columns([3, 3], [3, 3]))


class Edits(Plain):
    """Drops a row's first position from the scores: by a new mask in its dict, or inside the tensor it was given."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.where == "dict":
            features["attention_mask"] = features["attention_mask"].clone()
        features["attention_mask"][:, 0] = 0
        features["token_embeddings"] = self.table(features["input_ids"])
        return features


def test_a_module_that_edits_its_features() -> None:
    """It gets a dict of its own: the trainer's stays as it was, and a second forward gives the same loss."""
    model, features = Edits("dict"), plain_columns([3, 2], [4, 2], [2, 3])
    before = copy.deepcopy(features)
    loss = ColbertLoss(model, temperature=1.0)
    first, second = loss(features), loss(features)
    assert torch.equal(first, second)
    for column, old in zip(features, before, strict=True):
        assert column.keys() == old.keys()
        assert all(torch.equal(column[name], old[name]) for name in old)


@pytest.mark.parametrize("where", ["dict", "tensor"])
def test_content_is_what_the_trainer_passed(where: str) -> None:
    """Documents that differ only in a token that the module hides while encoding are no copies of each other."""
    features = plain_columns([3, 2], [3, 3])
    features[1]["input_ids"] = torch.tensor([[11, 12, 13], [21, 12, 13]])
    features[1]["attention_mask"] = torch.ones(2, 3, dtype=torch.long)
    model = Edits(where)
    value = ColbertLoss(model, temperature=1.0)(features)
    # Both documents are encoded alike, so each query is undecided between its positive and the other.
    torch.testing.assert_close(value, torch.tensor(2.0).log(), rtol=VALUE, atol=VALUE)


@pytest.mark.parametrize("smooth", [False, True])
def test_scoring_ignores_autocast(smooth: bool) -> None:
    """Same bits with autocast around the loss: the embeddings here come from a table, which it leaves alone."""
    model, features = Plain(), plain_columns([3, 2], [4, 1], [2, 2])
    loss = ColbertNegativeCELoss(model, temperature=1.0, use_smooth_max=smooth)
    expected = loss(features)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loss(features)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    assert_same_gradients(gradients(actual, model), gradients(expected, model), 0)


def test_loss_goes_through_the_model_it_holds() -> None:
    """Trainers replace ``loss.model`` by a wrapper after construction; all forwards must go through it."""

    class Counting(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.module(*args, **kwargs)

    loss = ColbertLoss(Plain())
    loss.model = Counting(loss.model)
    loss(plain_columns([3, 2], [4, 1], [2, 2]))
    assert loss.model.calls == 3


# The model of this environment's world


@pytest.mark.parametrize("padding", [0, 4])
def test_scored_tokens_are_those_of_encode(padding: int) -> None:
    """Which tokens count, and their vectors, as the library itself searches with them."""
    model = tiny_model()
    queries, documents = columns(model, QUERIES, POSITIVES)
    documents = pad(documents, padding)
    for features, texts, is_query in [(queries, QUERIES, True), (documents, POSITIVES, False)]:
        ours, theirs = scored_tokens(model, features, is_query=is_query), encoded(model, texts, is_query=is_query)
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)  # batches of other widths
            torch.testing.assert_close(mine.norm(dim=-1), torch.ones(len(mine)), rtol=1e-6, atol=1e-6)


def test_features_are_left_as_they_were() -> None:
    model = tiny_model()
    features = columns(model, QUERIES, POSITIVES, NEGATIVES)
    before = copy.deepcopy(features)
    ColbertLoss(model)(features).backward()
    for column, old in zip(features, before, strict=True):
        assert column.keys() == old.keys()
        for name, value in old.items():
            assert torch.equal(column[name], value) if isinstance(value, Tensor) else column[name] == value


def model_to_wrap() -> nn.Module:
    """A model that is not scored as a plain module would be: PyLate's never is."""
    model = tiny_model()
    if not PYLATE:
        skip_punctuation(model)
        model[0].query_expansion = {"strategy": "fixed", "length": 9}
    return model


def test_wrapped_by_distributed_data_parallel(process_group: None) -> None:
    model = model_to_wrap()
    features = columns(model, QUERIES, POSITIVES, NEGATIVES)
    # As both trainers wrap these models (BERT's pooler takes no part in the loss).
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    calls: list[int] = []
    wrapped.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = gradients(ColbertLoss(model)(features), model)
    value = ColbertLoss(wrapped)(features)
    assert len(calls) == 3  # the wrapper itself was called, which is what shares gradients
    torch.testing.assert_close(value, ColbertLoss(model)(features), rtol=VALUE, atol=VALUE)
    value.backward()
    actual = {name: p.grad.double() for name, p in model.named_parameters() if name in expected}
    assert_same_gradients(actual, expected, GRADIENT)


@through_compile
def test_wrapped_by_compile() -> None:
    model, graphs = model_to_wrap(), []
    features = columns(model, QUERIES, POSITIVES, NEGATIVES)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    assert_same_loss(ColbertLoss(compiled), features, ColbertLoss(model), features, model)
    assert graphs  # the compiled model was called


@through_compile
def test_wrapped_by_compile_and_distributed_data_parallel(process_group: None) -> None:
    """As accelerate nests the two."""
    model = model_to_wrap()
    features = columns(model, QUERIES, POSITIVES)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    value = ColbertLoss(torch.compile(wrapped, backend="eager"))(features)
    torch.testing.assert_close(value, ColbertLoss(model)(features), rtol=VALUE, atol=VALUE)
    value.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_subclass_of_the_world_s_model() -> None:
    model = tiny_model()
    features = columns(model, QUERIES, POSITIVES)
    expected = ColbertLoss(model)(features)
    model.__class__ = type("Mine", (type(model),), {})
    assert torch.equal(ColbertLoss(model)(features), expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))], ids=["copy", "pickle"])
def test_copies_of_a_loss(how: Any) -> None:
    """Equal, and independent: training one leaves the other alone."""
    model = tiny_model()
    features = columns(model, QUERIES, POSITIVES)
    loss = ColbertPairwiseCELoss(model, temperature=0.5, use_smooth_max=True)
    other = how(loss)
    assert other.get_config_dict() == loss.get_config_dict()
    expected = loss(features)
    assert torch.equal(other(features), expected)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p))
    other.temperature = 2.0
    assert not torch.equal(other(features), expected)
    assert torch.equal(loss(features), expected)


# Importing


def test_use_needs_neither_library() -> None:
    """An environment with torch alone uses the package with a module of its own."""
    script = (
        "import sys, torch, st_colbert_losses as s\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, features):\n"
        "        return {'token_embeddings': features['x'], 'attention_mask': features['x'][..., 0] > 0}\n"
        "columns = [{'x': torch.rand(2, 3, 4, requires_grad=True)} for _ in range(3)]\n"
        "s.ColbertNegativeCELoss(Model())(columns).backward()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    root = Path(st_colbert_losses.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "st_colbert_losses" in loaded
    assert not {"pylate", "sentence_transformers", "transformers", "datasets"} & loaded


if PYLATE:
    ROLE = "column 0 was tokenised as documents"

    @pytest.mark.parametrize("expansion", [False, True], ids=["plain", "expansion"])
    def test_query_mask(expansion: bool) -> None:
        """With query expansion every position is scored, the [MASK] tokens that nothing attends to as well."""
        model = tiny_model(expansion=expansion)
        queries, _ = columns(model, QUERIES, POSITIVES)
        attended = queries["attention_mask"].bool()
        assert not attended.all()
        mask = embed(model, queries, is_query=True).mask
        assert torch.equal(mask, torch.ones_like(attended) if expansion else attended)

    @pytest.mark.parametrize("expansion", [False, True], ids=["plain", "expansion"])
    def test_scored_query_tokens_are_those_of_encode(expansion: bool) -> None:
        model = tiny_model(expansion=expansion)
        queries, _ = columns(model, QUERIES, POSITIVES)
        for mine, wanted in zip(
            scored_tokens(model, queries, is_query=True), encoded(model, QUERIES, is_query=True), strict=True
        ):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)

    def test_attended_expansion_tokens() -> None:
        """Without query expansion, but attending to the [MASK] tokens, their mask says that they count."""
        model = tiny_model(expansion=False)
        model.attend_to_expansion_tokens = True
        queries, _ = columns(model, QUERIES, POSITIVES)
        assert embed(model, queries, is_query=True).mask.all()

    def test_document_mask_leaves_out_the_skiplist() -> None:
        model = tiny_model()
        _, documents = columns(model, QUERIES, POSITIVES)
        tokens = [model.tokenizer.convert_ids_to_tokens(row) for row in documents["input_ids"].tolist()]
        assert any("," in row for row in tokens)
        expected = [[token not in {",", ".", "?", "[UNK]", "[PAD]"} for token in row] for row in tokens]
        attended = documents["attention_mask"].bool()
        assert torch.equal(embed(model, documents, is_query=False).mask, torch.tensor(expected) & attended)
        model.skiplist = []
        assert torch.equal(embed(model, documents, is_query=False).mask, attended)

    def test_queries_keep_their_punctuation() -> None:
        model = tiny_model(expansion=False)
        (queries, _) = columns(model, ["what , sings ?"], ["bird"])
        assert int(embed(model, queries, is_query=True).mask.sum()) == int(queries["attention_mask"].sum())

    def test_embeddings_are_normalised_by_the_loss() -> None:
        model = tiny_model()
        queries, _ = columns(model, QUERIES, POSITIVES)
        raw = model(dict(queries))["token_embeddings"]
        assert not_unit(raw)  # PyLate's model does not
        vectors = embed(model, queries, is_query=True).vectors
        torch.testing.assert_close(vectors, raw / raw.norm(dim=-1, keepdim=True), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("expansion", [False, True], ids=["plain", "expansion"])
    def test_more_padding_changes_nothing(expansion: bool) -> None:
        """Documents padded to another length; queries too, where the padding is no query expansion."""
        model = tiny_model(expansion=expansion)
        narrow = columns(model, QUERIES, POSITIVES, NEGATIVES)
        model.document_length = 29
        model.query_length = 8 if expansion else 13
        wide = columns(model, QUERIES, POSITIVES, NEGATIVES)
        assert wide[1]["input_ids"].shape[1] == 29
        for smooth in (False, True):
            loss = ColbertLoss(model, use_smooth_max=smooth)
            assert_same_loss(loss, wide, loss, narrow, model)

    def roles(caplog: pytest.LogCaptureFixture) -> list[str]:
        return [r.getMessage() for r in caplog.records if ROLE in r.getMessage()]

    @through_compile
    @pytest.mark.parametrize("compiled", [False, True], ids=["bare", "compiled"])
    def test_queries_tokenised_as_documents(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
        model = tiny_model()
        features = [model.tokenize(texts, is_query=False, pad=True) for texts in (QUERIES, POSITIVES)]
        loss = ColbertLoss(torch.compile(model, backend="eager") if compiled else model)
        with caplog.at_level(logging.INFO, logger="st_colbert_losses"):
            loss(features)
            loss(features)
        (message,) = roles(caplog)
        assert message.startswith("ColbertLoss: ")
        assert "rename it" in message
        assert "'query' or 'anchor'" in message
        assert [r.levelno for r in caplog.records if ROLE in r.getMessage()] == [logging.WARNING]

    def test_documents_tokenised_as_queries(caplog: pytest.LogCaptureFixture) -> None:
        """By a document column whose name contains "query", or by a Trainer without PyLate's collator."""
        model = tiny_model()
        features = [model.tokenize(texts, is_query=True, pad=True) for texts in (QUERIES, POSITIVES)]
        with caplog.at_level(logging.WARNING, logger="st_colbert_losses"):
            ColbertLoss(model)(features)
        (record,) = [record for record in caplog.records if record.name == "st_colbert_losses"]
        assert "column 1 was tokenised as queries" in record.getMessage()
        assert "data_collator=ColBERTCollator(model.tokenize)" in record.getMessage()

    @pytest.mark.parametrize("prefixes", [("[Q] ", "[D] "), ("", ""), ("red", "red")])
    def test_queries_tokenised_as_queries(prefixes: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
        """No false alarm, also where prefixes cannot tell the roles apart."""
        model = tiny_model()
        ids = [model.tokenizer.convert_tokens_to_ids(prefix) if prefix else None for prefix in prefixes]
        model.query_prefix_id, model.document_prefix_id = ids
        loss = ColbertLoss(model)
        with caplog.at_level(logging.INFO, logger="st_colbert_losses"):
            loss(columns(model, QUERIES, POSITIVES))
        assert roles(caplog) == []


if not PYLATE:
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Normalize

    def skip_punctuation(model: nn.Module) -> None:
        (mask,) = (module for module in model if isinstance(module, MultiVectorMask))
        mask.skiplist_words = [".", ","]
        mask.resolve_with_tokenizer(model.tokenizer)

    def test_mask_is_the_one_that_the_model_returns() -> None:
        """With a skiplist for documents and with query expansion: neither can be told from the features alone."""
        model = tiny_model()
        skip_punctuation(model)
        model[0].query_expansion = {"strategy": "fixed", "length": 9}
        queries, documents = columns(model, QUERIES, POSITIVES)
        assert embed(model, queries, is_query=True).mask.all()
        assert not queries["attention_mask"].bool().all()
        mask = embed(model, documents, is_query=False).mask
        assert int(mask.sum()) == int(documents["attention_mask"].sum()) - 2  # a comma and a full stop
        for features, texts, is_query in [(queries, QUERIES, True), (documents, POSITIVES, False)]:
            ours, theirs = scored_tokens(model, features, is_query=is_query), encoded(model, texts, is_query=is_query)
            for mine, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)

    def test_task_goes_by_position() -> None:
        """Column 0 is the query whatever the features say; the model would take a query without a task as document."""
        model = tiny_model()
        skip_punctuation(model)
        model[0].query_expansion = {"strategy": "fixed", "length": 9}
        features = columns(model, ["what , sings", "one blue two"], *(text[:2] for text in (POSITIVES, NEGATIVES)))
        tasks = []
        model.register_forward_pre_hook(lambda _, args, kwargs: tasks.append(kwargs.get("task")), with_kwargs=True)
        loss = ColbertLoss(model)
        expected = loss(features)
        assert tasks == ["query", "document", "document"]
        bare = [{name: value for name, value in column.items() if name != "task"} for column in features]
        assert torch.equal(loss(bare), expected)
        misleading = [{**column, "task": "document"} for column in features]
        assert torch.equal(loss(misleading), expected)

    def test_embeddings_are_scored_as_returned() -> None:
        """The model's own Normalize module makes them unit length; without one they are not, and the loss says so."""
        model = tiny_model()
        queries, _ = columns(model, QUERIES, POSITIVES)
        returned = model(dict(queries), task="query")["token_embeddings"]
        assert torch.equal(embed(model, queries, is_query=True).vectors, returned)
        (name,) = (name for name, module in model.named_children() if isinstance(module, Normalize))
        delattr(model, name)
        raw = model(dict(queries), task="query")["token_embeddings"]
        assert not_unit(raw)
        assert torch.equal(embed(model, queries, is_query=True).vectors, raw)

    def test_more_padding_changes_nothing() -> None:
        model = tiny_model()
        skip_punctuation(model)
        features = columns(model, QUERIES, POSITIVES, NEGATIVES)
        wide = [pad(column, 3 + i) for i, column in enumerate(features)]
        for smooth in (False, True):
            loss = ColbertLoss(model, use_smooth_max=smooth)
            assert_same_loss(loss, wide, loss, features, model)
