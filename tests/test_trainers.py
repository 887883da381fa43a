"""The losses inside the real trainers: sentence-transformers' with PyLate's collator, or the multi-vector one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.bert.modeling_bert import BertAttention

import st_colbert_losses
from st_colbert_losses import ColbertLoss, ColbertNegativeCELoss, ColbertPairwiseCELoss, ColbertSigmoidLoss
from tests import reference
from tests.models import PYLATE, assert_same_gradients, columns, encoded, gradients, tiny_model

if PYLATE:
    from pylate.models import ColBERT as Model
    from pylate.utils import ColBERTCollator
    from sentence_transformers import SentenceTransformerTrainer as WorldTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
else:
    from sentence_transformers import MultiVectorEncoder as Model
    from sentence_transformers import MultiVectorEncoderTrainer as WorldTrainer
    from sentence_transformers import MultiVectorEncoderTrainingArguments as Arguments

NAMES = [
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertPairwiseCELoss",
    "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
]
TEMPERATURES = {name: 1.0 if name == "ColbertPairwiseCELoss" else 0.02 for name in NAMES}

# Rows 0 and 4 share a positive, rows 2 and 5 a query, and the negative of row 3 is its own positive.
ROWS = {
    "query": ["what sings", "what eats red fish", "one blue two", "what cat sleeps", "sings", "one blue two"],
    "positive": ["bird sings", "the red cat eats .", "three dog two one", "six cat", "bird sings", "blue , one , two"],
    "negative": ["dog", "blue fish", "ten sleeps eats", "six cat", "red", "seven eight nine ten"],
}
PAIRS = {name: column[:4] for name, column in ROWS.items() if name != "negative"}

# float32 cosines, 1e-7, over the sharpest temperature, 0.02.
VALUE = 2e-5

# What torch.compile says of the libraries' code, not ours.
through_compile = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def trainer_for(
    model: nn.Module, loss: Any, folder: Path, train: Any, evaluation: Any = None, **options: Any
) -> Trainer:
    """A trainer that takes all rows of a dataset as one batch and logs every step."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, **options}
    arguments = Arguments(
        output_dir=str(folder),
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    collator = {"data_collator": ColBERTCollator(model.tokenize)} if PYLATE else {}
    return WorldTrainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=evaluation, loss=loss, **collator
    )


def train(model: nn.Module, loss: Any, folder: Path, data: Any, evaluation: Any = None, **options: Any) -> list[float]:
    """Train and return the loss of every step."""
    trainer = trainer_for(model, loss, folder, data, evaluation, **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone().double() for name, p in model.named_parameters()}


def updates(loss: Callable[[nn.Module], nn.Module], folder: Path, data: Any, *, dropout: float = 0.0, **options: Any):
    """What SGD with a learning rate of 1 adds to each weight in one step: minus the gradient."""
    model = tiny_model(dropout=dropout)
    before = weights(model)
    train(model, loss(model), folder, data, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **options)
    return {name: after - before[name] for name, after in weights(model).items()}


def by_hand(
    name: str, model: nn.Module, data: dict[str, list], labels: list[int] | None = None, **options: Any
) -> float:
    """The loss of a batch in plain loops over the tokens that the library itself would search with."""
    queries, *rest = data.values()
    cells = zip(*rest, strict=True)  # a cell is a document, or a list of several
    documents = [[text for cell in row for text in ([cell] if isinstance(cell, str) else cell)] for row in cells]
    query_tokens = encoded(model, queries, is_query=True)
    document_tokens = iter(encoded(model, [text for row in documents for text in row], is_query=False))
    rows = [
        reference.Row(
            query=query_tokens[i].double(),
            documents=[next(document_tokens).double() for _ in texts],
            query_ids=tuple(queries[i].split()),
            document_ids=[tuple(text.split()) for text in texts],
            label=None if labels is None else labels[i],
        )
        for i, texts in enumerate(documents)
    ]
    options = {"temperature": TEMPERATURES[name], **options}
    return float(reference.loss(name, rows, **options))


# Training


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls(name: str, tmp_path: Path) -> None:
    model = tiny_model(dropout=0.1)
    data = {column: values[:3] for column, values in ROWS.items()}
    losses = train(
        model,
        getattr(st_colbert_losses, name)(model),
        tmp_path,
        Dataset.from_dict(data),
        max_steps=8,
        learning_rate=0.01,
    )
    assert len(losses) == 8
    assert (
        losses[-1] < 0.92 * losses[0]
    )  # over means, at temperature 1, the pairwise loss starts near 0.7, ends near 0.5


def test_training_loss_is_the_loss(tmp_path: Path) -> None:
    """The first step's, before any update, against plain loops."""
    model = tiny_model()
    expected = by_hand("ColbertLoss", model, ROWS)
    assert train(model, ColbertLoss(model), tmp_path, Dataset.from_dict(ROWS)) == [pytest.approx(expected, rel=VALUE)]


@pytest.mark.parametrize("how", ["instance", "class", "callable"])
def test_loss_as_instance_class_or_callable(how: str, tmp_path: Path) -> None:
    model = tiny_model()
    loss = {
        "instance": ColbertLoss(model, temperature=0.1),
        "class": ColbertLoss,
        "callable": lambda m: ColbertLoss(m, temperature=0.1),
    }[how]
    expected = by_hand("ColbertLoss", model, PAIRS, temperature=0.02 if how == "class" else 0.1)
    losses = train(model, loss, tmp_path, Dataset.from_dict(PAIRS))
    assert losses == [pytest.approx(expected, rel=VALUE)]


def test_a_loss_per_dataset(tmp_path: Path) -> None:
    """Each dataset trains and evaluates with its own loss; two of the three share an instance."""
    model = tiny_model()
    shared, own = ColbertLoss(model, temperature=0.1), ColbertNegativeCELoss(model)
    calls: list[str] = []
    shared.register_forward_hook(lambda *_: calls.append("shared"))
    own.register_forward_hook(lambda *_: calls.append("own"))
    data = DatasetDict({"a": Dataset.from_dict(PAIRS), "b": Dataset.from_dict(ROWS), "c": Dataset.from_dict(ROWS)})
    losses = {"a": shared, "b": own, "c": shared}
    trainer = trainer_for(model, losses, tmp_path, data, data, max_steps=3, multi_dataset_batch_sampler="round_robin")
    trainer.train()
    assert sorted(calls) == ["own", "shared", "shared"]
    metrics = trainer.evaluate()
    expected = {
        "eval_a_loss": by_hand("ColbertLoss", model, PAIRS, temperature=0.1),
        "eval_b_loss": by_hand("ColbertNegativeCELoss", model, ROWS),
        "eval_c_loss": by_hand("ColbertLoss", model, ROWS, temperature=0.1),
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=VALUE)


def test_features_stay_as_the_trainer_made_them(tmp_path: Path) -> None:
    model = tiny_model()
    loss = ColbertNegativeCELoss(model)
    seen: list[tuple[list[dict], list[dict]]] = []
    loss.register_forward_pre_hook(lambda _, args: seen.append((args[0], copy.deepcopy(args[0]))))

    def check(*_: Any) -> None:
        features, before = seen[-1]
        assert [list(column) for column in features] == [list(column) for column in before]
        for column, old in zip(features, before, strict=True):
            for name, value in old.items():
                assert torch.equal(column[name], value) if isinstance(value, Tensor) else column[name] == value

    loss.register_forward_hook(check)
    train(model, loss, tmp_path, Dataset.from_dict(ROWS), max_steps=2)
    assert len(seen) == 2


# Evaluation


@pytest.mark.parametrize("labels", [None, [0, 1, 2, 0, 3, 1]], ids=["plain", "labels"])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_loss(name: str, labels: list[int] | None, tmp_path: Path) -> None:
    """Dropout off, no graph, copies and labels left out, as plain loops say."""
    model = tiny_model(dropout=0.3)
    loss = getattr(st_colbert_losses, name)(model)
    graphs: list[bool] = []
    loss.register_forward_hook(lambda _, args, value: graphs.append(value.requires_grad))
    data = Dataset.from_dict(ROWS if labels is None else {**ROWS, "label": labels})
    metrics = trainer_for(model, loss, tmp_path, data, data).evaluate()
    assert metrics["eval_loss"] == pytest.approx(by_hand(name, model, ROWS, labels), rel=VALUE)
    assert graphs == [False]
    if labels is not None:  # they told something
        assert by_hand(name, model, ROWS) != pytest.approx(metrics["eval_loss"], rel=2 * VALUE)


def test_copies_matter_to_the_evaluation_loss(tmp_path: Path) -> None:
    model = tiny_model()
    data = Dataset.from_dict(ROWS)
    loss = ColbertLoss(model, mask_duplicate_documents=False)
    value = trainer_for(model, loss, tmp_path, data, data).evaluate()["eval_loss"]
    assert value == pytest.approx(by_hand("ColbertLoss", model, ROWS, mask_duplicate_documents=False), rel=VALUE)
    assert value > by_hand("ColbertLoss", model, ROWS) + 1e-3


def test_changed_hyperparameters_take_effect(tmp_path: Path) -> None:
    model = tiny_model()
    data, loss = Dataset.from_dict(PAIRS), ColbertSigmoidLoss(model)
    trainer = trainer_for(model, loss, tmp_path, data, data)
    for options in ({"temperature": 0.02}, {"temperature": 0.5}, {"temperature": 0.5, "bias": 0.4}):
        for option, value in options.items():
            setattr(loss, option, value)
        expected = by_hand("ColbertSigmoidLoss", model, PAIRS, **options)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=VALUE)


# How steps are made


class SumOfWeights(nn.Module):
    """A loss with a gradient of 1 everywhere, to see what a trainer makes of any gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Any, labels: Tensor | None = None) -> Tensor:
        return sum(p.sum() for p in self.model.parameters())


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_gradient_accumulation(micro_batches: int, tmp_path: Path) -> None:
    """Micro-batches of the same rows make the same step as one of them.

    Up to a factor that is the trainer's: transformers 5.3 divides every loss by their number twice.
    """
    data = Dataset.from_dict(ROWS)
    options = {"gradient_accumulation_steps": micro_batches, "multi_dataset_batch_sampler": "round_robin"}
    copies = DatasetDict({str(i): data for i in range(micro_batches)})  # each a micro-batch of its own
    factor = -next(iter(updates(SumOfWeights, tmp_path, copies, **options).values())).mean()
    assert float(factor) == pytest.approx(1 / micro_batches if PYLATE else 1, rel=1e-4)
    calls: list[int] = []

    def counted(model: nn.Module) -> nn.Module:
        loss = ColbertLoss(model)
        loss.register_forward_hook(lambda *_: calls.append(1))
        return loss

    one = updates(ColbertLoss, tmp_path, data)
    several = updates(counted, tmp_path, copies, **options)
    assert len(calls) == micro_batches
    # The rows of a micro-batch come in another order, and a weight of 1 holds 1e-7 of the update beside it.
    assert_same_gradients({name: update / factor for name, update in several.items()}, one, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    """Same step, dropout included, from activations that were computed twice."""
    data = Dataset.from_dict(ROWS)
    calls: list[int] = []

    def counted(model: nn.Module) -> nn.Module:
        attention = next(module for module in model.modules() if isinstance(module, BertAttention))
        calls.append(0)
        attention.register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
        return ColbertNegativeCELoss(model)

    plain = updates(counted, tmp_path, data, dropout=0.1)
    checkpointed = updates(
        counted,
        tmp_path,
        data,
        dropout=0.1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert calls == [3, 6]
    assert_same_gradients(checkpointed, plain, 1e-6)  # the same operations on the same numbers


@pytest.mark.parametrize("name", NAMES)
def test_bf16(name: str, tmp_path: Path) -> None:
    """Autocast in the model, not in the loss: scores of the embeddings that come out of it, in float32."""
    data, losses = Dataset.from_dict(ROWS), {}
    for bf16 in (False, True):
        model = tiny_model()
        loss = getattr(st_colbert_losses, name)(model, temperature=0.5)
        inner: list[torch.dtype] = []
        outer: list[torch.dtype] = []
        dense = next(
            module for module in model.modules() if isinstance(module, nn.Linear) and module.in_features == 16
        )
        dense.register_forward_hook(lambda _, args, out, inner=inner: inner.append(out.dtype))
        loss.register_forward_hook(lambda _, args, value, outer=outer: outer.append(value.dtype))
        losses[bf16] = train(model, loss, tmp_path, data, max_steps=3, learning_rate=1e-3, bf16=bf16)
        assert set(inner) == {torch.bfloat16 if bf16 else torch.float32}
        assert set(outer) == {torch.float32}
    # bfloat16 keeps 8 bits: 0.4 % a rounding, a few of them in a row, over a temperature of 0.5.
    assert losses[True] == pytest.approx(losses[False], rel=0.05)
    assert losses[True] != losses[False]


# torch.compile


@through_compile
def test_compiled_model() -> None:
    model = tiny_model()
    features = columns(model, *ROWS.values())
    compiled = torch.compile(model, backend="aot_eager")
    for name in NAMES:
        loss, other = (getattr(st_colbert_losses, name)(m, temperature=0.1) for m in (compiled, model))
        actual, expected = loss(features), other(features)
        torch.testing.assert_close(actual, expected, rtol=VALUE, atol=VALUE)
        assert_same_gradients(gradients(actual, model), gradients(expected, model), 1e-5)  # float32, fused otherwise


@through_compile
def test_compiled_by_the_trainer(tmp_path: Path) -> None:
    data, held = Dataset.from_dict(ROWS), []

    def watched(model: nn.Module) -> nn.Module:
        loss = ColbertPairwiseCELoss(model, temperature=0.1)
        loss.register_forward_pre_hook(lambda module, _: held.append(hasattr(module.model, "_orig_mod")))
        return loss

    eager = updates(watched, tmp_path, data)
    compiled = updates(watched, tmp_path, data, torch_compile=True, torch_compile_backend="aot_eager")
    assert held == [False, True]  # the loss did call the compiled model
    assert_same_gradients(compiled, eager, 1e-5)  # float32, fused otherwise


# What is left of a training


def test_save_and_reload(tmp_path: Path) -> None:
    """The trained model, loaded by its library alone, embeds as it did."""
    model = tiny_model(dropout=0.1)
    before = encoded(model, ROWS["positive"], is_query=False)
    trainer = trainer_for(
        model, ColbertLoss(model), tmp_path, Dataset.from_dict(ROWS), max_steps=2, learning_rate=0.01
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = Model(str(tmp_path / "saved"), device="cpu")
    model.eval()
    for texts, is_query in [(ROWS["query"], True), (ROWS["positive"], False)]:
        for ours, theirs in zip(
            encoded(model, texts, is_query=is_query), encoded(loaded, texts, is_query=is_query), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(before[0], encoded(loaded, ROWS["positive"], is_query=False)[0])


@pytest.mark.parametrize("name", NAMES)
def test_model_card(name: str, tmp_path: Path) -> None:
    """The library's own card names the loss, shows its hyperparameters as JSON and cites its papers."""
    model = tiny_model()
    loss = getattr(st_colbert_losses, name)(model, use_smooth_max=True)
    trainer = trainer_for(model, loss, tmp_path, Dataset.from_dict(ROWS))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"loss:{name}" in card  # the tag that the Hub searches by
    shown = re.search(rf"{name}</code>.*?with these parameters:\s*```json(.*?)```", card, re.DOTALL)
    assert shown, card
    config = json.loads(shown[1])
    assert config == loss.get_config_dict()
    assert config["temperature"] == TEMPERATURES[name]
    assert config["use_smooth_max"] is True
    papers = {"ColbertLoss": "oord2018", "ColbertNegativeCELoss": "oord2018", "ColbertSigmoidLoss": "zhai2023"}
    for paper in ("khattab2020", papers.get(name, "faysse2024")):
        assert re.search(rf"^@\w+{{{paper}", card, re.MULTILINE), paper


if PYLATE:

    @pytest.mark.parametrize("name", NAMES)
    def test_list_column(name: str, tmp_path: Path) -> None:
        """PyLate's way to pass several negatives per row: a column of lists."""
        model = tiny_model()
        pairs = {key: ROWS[key] for key in ("query", "positive")}
        negatives = [[text, f"{text} dog", "ten nine"] for text in ROWS["negative"]]
        data = Dataset.from_dict({**pairs, "negatives": negatives})
        metrics = trainer_for(model, getattr(st_colbert_losses, name)(model), tmp_path, data, data).evaluate()
        assert metrics["eval_loss"] == pytest.approx(
            by_hand(name, model, {**pairs, "negatives": negatives}), rel=VALUE
        )
