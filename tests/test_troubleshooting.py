"""What docs/troubleshooting.md says: the values at which losses stay, and what the log says."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import st_colbert_losses as ours
from st_colbert_losses import Tokens

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
ROUNDING = 1e-6  # float32
LN2 = math.log(2)


def alike(rows: int = 8) -> Tokens:
    """A collapsed model's: every token the same unit vector."""
    return Tokens(torch.full((rows, 3, 4), 0.5))


def apart(scores: Tensor) -> tuple[Tokens, Tokens]:
    """One-token queries and documents that score so."""
    return Tokens(torch.eye(len(scores))[:, None]), Tokens(scores.T[:, None], torch.ones(len(scores), 1))


def stay(name: str, columns: int = 1, **options: object) -> float:
    return getattr(ours, name)(nn.Identity(), **options).from_tokens(alike(), [alike()] * columns).item()


@pytest.mark.parametrize(
    ("name", "columns", "value", "said"),
    [
        ("ColbertLoss", 1, math.log(8), "2.079 at 8"),
        ("ColbertLoss", 3, math.log(24), "ln 24 = 3.18"),
        ("ColbertPairwiseCELoss", 1, LN2, "0.693"),
        ("ColbertPairwiseNegativeCELoss", 2, LN2, "0.693"),
        ("ColbertNegativeCELoss", 2, (LN2 + math.log(8)) / 2, "1.386 at 8"),
    ],
)
def test_all_documents_alike(name: str, columns: int, value: float, said: str):
    assert stay(name, columns) == pytest.approx(value, rel=ROUNDING)
    assert said in PROSE


class Collapsed(nn.Module):
    """A model that has one parameter and one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = features["input_ids"]
        return {"token_embeddings": alike(len(ids)).vectors + self.weight, "attention_mask": torch.ones(len(ids), 3)}


def test_the_loss_rises_as_the_queue_fills():
    loss, found = ours.MoCoColbertLoss(Collapsed(), queue_size=16), []
    for step in range(4):
        ids = torch.arange(16).view(2, 8, 1) + 16 * step
        found.append(loss([{"input_ids": column} for column in ids]).item())
    assert found == pytest.approx([math.log(8 + queued) for queued in (0, 8, 16, 16)], rel=ROUNDING)


def test_sigmoid_at_its_bias():
    queries, documents = apart(torch.full((8, 8), 0.3))
    found = ours.ColbertSigmoidLoss(nn.Identity(), bias=0.3).from_tokens(queries, [documents])
    assert found.item() == pytest.approx(LN2, rel=ROUNDING)


@pytest.mark.parametrize(("bias", "said"), [(0.0, "34"), (0.8, "0.5")])
def test_sigmoid_on_a_fresh_model(bias: float, said: str):
    queries, documents = apart(torch.full((8, 8), 0.787))
    found = ours.ColbertSigmoidLoss(nn.Identity(), bias=bias).from_tokens(queries, [documents]).item()
    assert f"{found:.{len(said.partition('.')[2])}f}" == said
    assert f"at {said}" in PROSE


@pytest.mark.parametrize(("margin", "said"), [(0.0, "0.69"), (0.43, "0.50"), (1.0, "0.31")])
def test_pairwise_on_means(margin: float, said: str):
    queries, documents = apart(torch.eye(4) * margin)
    found = ours.ColbertPairwiseCELoss(nn.Identity()).from_tokens(queries, [documents]).item()
    assert f"{found:.2f}" == said == f"{F.softplus(torch.tensor(-margin)).item():.2f}"
    assert said in PROSE


@pytest.mark.parametrize(("temperature", "said"), [(1.0, "1.45"), (10.0, "2.01"), (100.0, "2.07")])
def test_temperature_too_high(temperature: float, said: str):
    queries, documents = apart(torch.eye(8) * 0.76)
    loss = ours.ColbertLoss(nn.Identity(), temperature=temperature)
    assert f"{loss.from_tokens(queries, [documents]).item():.2f}" == said
    assert said in PROSE


@pytest.mark.parametrize(("margin", "said"), [(0.1, "0.096"), (0.2, "0.0007"), (0.4, "3e-8")])
def test_easy_negatives(margin: float, said: str):
    queries, documents = apart(torch.eye(16) * margin)
    found = ours.ColbertLoss(nn.Identity()).from_tokens(queries, [documents]).item()
    assert found == pytest.approx(float(said), rel=0.05)
    assert said in PROSE


def test_nothing_to_contrast_with():
    one = alike(1)
    loss = ours.ColbertNegativeCELoss(nn.Identity())
    assert f"{loss.from_tokens(one, [one, one]).item():.2f}" == "0.35"
    for name in ("ColbertLoss", "ColbertPairwiseCELoss"):
        assert getattr(ours, name)(nn.Identity()).from_tokens(one, [one]) == 0
    loss = ours.ColbertLoss(nn.Identity())
    assert loss.from_tokens(alike(), [alike()], torch.ones(8, dtype=torch.long)) == 0
    assert loss.metrics["masked_share"] == 1
    loss = ours.ColbertLoss(nn.Identity(), pos_aware_negative_filtering=True, filter_mode="mask")
    assert loss.from_tokens(alike(), [alike()]) == 0
    assert loss.metrics["filtered_share"] == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_comes_in_goes_out(bad: float, caplog: pytest.LogCaptureFixture):
    vectors = torch.full((8, 3, 4), 0.5)
    vectors[0, 0, 0] = bad
    assert ours.ColbertLoss(nn.Identity()).from_tokens(Tokens(vectors), [alike()]).isnan()
    assert [record.args[1][:26] for record in caplog.records] == ["scores are NaN or infinite"]


def log_calls() -> list[str]:
    """Each message of the package, with {} for what is put in."""
    messages = []
    for path in (ROOT / "st_colbert_losses").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in ("warn", "warning", "info", "error"):
                    continue
                texts = [
                    part for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant)
                ]
                messages.append(" ".join(str(part.value) for part in texts))
    return messages


def test_every_line_of_the_log_is_explained():
    section = PAGE.partition("## Warnings, one by one")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    patterns = [re.compile(".*".join(map(re.escape, row.removeprefix("INFO: ").split("...")))) for row in rows]
    messages = log_calls()
    assert len(messages) == len(patterns)
    for message in messages:
        assert any(pattern.search(message) for pattern in patterns), message
