"""What docs/migrating.md says of the peers' losses and ours: its numbers, in float64, and its code blocks."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import st_colbert_losses as ours
from st_colbert_losses import Tokens
from tests.models import PYLATE

PAGE = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
# Peers and we sum in another order, 1e-16 a rounding; sentence-transformers returns its scores in float32.
SAME = 1e-12 if PYLATE else 1e-6
SOFTPLUS = 3e-9  # torch's softplus, colpali-engine's, returns x above 20
TEACHER = torch.tensor([[5, 1, 3], [2, 2.5, 0], [9, 8, 1], [0.5, 0.2, 0.1]], dtype=torch.float64)

QUERY_LENGTHS = [5, 3, 6, 4]
DOCUMENT_LENGTHS = [[7, 4, 9, 7], [5, 8, 6, 3], [9, 2, 4, 7]]  # positives, two columns of negatives
Column = tuple[Tensor, Tensor]  # vectors (4, T, 8), mask (4, T)


def column(lengths: list[int], nth: int, *, full: bool, positive: bool = False) -> Column:
    """Unit vectors that are the same on every machine; ``full`` scores every position."""
    places = torch.arange(len(lengths) * max(lengths) * 8, dtype=torch.float64) + 1000 * nth + 1
    vectors = (places * places * 0.37).sin().view(len(lengths), max(lengths), 8)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return F.normalize(vectors.abs() if positive else vectors, dim=-1), mask | full


def make_batch(*, full: bool, positive: bool = False) -> list[Column]:
    lengths = [QUERY_LENGTHS, *DOCUMENT_LENGTHS]
    return [column(of_each, nth, full=full, positive=positive) for nth, of_each in enumerate(lengths)]


def with_copy(batch: list[Column]) -> list[Column]:
    """The last row's positive is the first row's: 7 tokens both."""
    vectors, mask = batch[1][0].clone(), batch[1][1].clone()
    vectors[3], mask[3] = vectors[0], mask[0]
    return [batch[0], (vectors, mask), *batch[2:]]


class Passthrough(nn.Module):
    """A model of either library whose features hold the embeddings, turned by a matrix that trains."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.eye(8, dtype=torch.float64))

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        vectors = F.normalize(features["vectors"] @ self.turn, dim=-1)
        return {"token_embeddings": vectors, "attention_mask": features["attention_mask"]}


def as_features(batch: list[Column], width: int | None = None) -> list[dict[str, Tensor]]:
    """Feature dicts; equal documents have equal ids. ``width`` pads documents, with garbage."""
    features = []
    for i, (vectors, mask) in enumerate(batch):
        more = 0 if width is None or i == 0 else width - mask.shape[1]
        vectors, mask = F.pad(vectors, (0, 0, 0, more), value=0.3), F.pad(mask, (0, more))
        ids = torch.tensor([int(1000 * row[0, 0].abs()) + 1 for row in vectors])[:, None].expand(mask.shape)
        features.append({"vectors": vectors, "input_ids": ids.clone(), "attention_mask": mask.long()})
    return features


def value(name: str, features: list[dict[str, Tensor]], labels: Tensor | None = None, **options: object) -> Tensor:
    """Our loss through the model's forward."""
    return getattr(ours, name)(Passthrough(), **options)([dict(f) for f in features], labels)


def stated(*found: Tensor | float) -> None:
    """The page says so, in one row of a table, to four places."""
    wanted = [f"{number(x):.4f}" for x in found]
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert any(all(w in row for w in wanted) for row in rows), f"no row says {wanted}"


def same(mine: Tensor | float, theirs: Tensor | float, tolerance: float = SAME) -> None:
    assert number(mine) == pytest.approx(number(theirs), rel=tolerance, abs=tolerance)


def number(x: Tensor | float) -> float:
    return x.item() if isinstance(x, Tensor) else x


OTHER_WORLD = "MultiVector" if PYLATE else "colpali_engine|pylate"


@pytest.mark.parametrize("block", [block for block in BLOCKS if not re.search(OTHER_WORLD, block)])
def test_block(block: str, tmp_path: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", block]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_label_column_gets_a_meaning():
    features = as_features(make_batch(full=True)[:2])
    assert value("ColbertLoss", features, torch.ones(4, dtype=torch.long)) == 0
    with pytest.raises(ValueError, match="one per row"):
        value("ColbertLoss", features, torch.ones(4))


if PYLATE:
    from colpali_engine.loss import late_interaction_losses as colpali
    from pylate.losses import CachedContrastive, Contrastive, Distillation

    IN_BATCH = ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"]
    EXPLICIT = ["ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"]

    @pytest.fixture(autouse=True)
    def _plain_torch(monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")

    def both(name: str, batch: list[Column], **options: object) -> tuple[Tensor, Tensor]:
        """colpali-engine's value, of zeros where there is padding, and ours, of masks."""
        queries, positives, *negatives = (vectors * scored[..., None] for vectors, scored in batch)
        width = max(n.shape[1] for n in negatives)
        stacked = torch.stack([F.pad(n, (0, 0, 0, width - n.shape[1])) for n in negatives], 1)
        theirs = getattr(colpali, name)(**options)
        mine = getattr(ours, name)(nn.Identity(), **options)
        tokens = [Tokens(*of_each) for of_each in (batch if name in EXPLICIT else batch[:2])]
        with contextlib.redirect_stdout(io.StringIO()):  # their remark on scores out of bounds
            theirs = theirs(queries, positives, *([stacked] if name in EXPLICIT else []))
        return theirs, mine.from_tokens(tokens[0], tokens[1:])

    @pytest.mark.parametrize("name", IN_BATCH + EXPLICIT)
    def test_colpali(name: str):
        """Without padding the same, and with padding where no similarity is below 0; else 0 wins their maximum."""
        whole = [(v[:, :5], m[:, :5]) for v, m in make_batch(full=True)]
        theirs, mine = both(name, whole)
        same(mine, theirs, SOFTPLUS)
        stated(theirs, mine)
        same(*both(name, make_batch(full=False, positive=True)), SOFTPLUS)
        for options in ({}, {"temperature": 1.0, "normalize_scores": False}):
            theirs, mine = both(name, make_batch(full=False), **options)
            assert abs(theirs - mine) > 1e-7
            stated(theirs, mine)

    def test_colpali_released():
        """ColPali's first loss, by hand: softplus of hardest negative less positive, of sums."""
        (queries, _), (positives, _), *_ = make_batch(full=True)
        scores = torch.einsum("bnd,csd->bcns", queries, positives).amax(3).sum(2)
        own = scores.diagonal()
        hardest = scores.masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf).amax(1)
        options = {"temperature": 1.0, "normalize_scores": False}
        for found in both("ColbertPairwiseCELoss", make_batch(full=True), **options):
            same(found, F.softplus(hardest - own).mean())

    def test_colpali_zeros_win_the_maximum(capsys: pytest.CaptureFixture[str]):
        """All similarities below 0: one padded position makes all scores 0."""
        queries = make_batch(full=True, positive=True)[0][0][:2]
        documents = -make_batch(full=True, positive=True)[1][0][:2]
        padded = F.pad(documents, (0, 0, 0, 1))
        loss = ours.ColbertLoss(nn.Identity(), temperature=0.1)
        first, second = (colpali.ColbertLoss(temperature=0.1)(queries, d) for d in (documents, padded))
        same(second, math.log(2))
        for d in (documents, padded):  # without a mask, tokens of zeros are padding
            same(loss.from_tokens(Tokens(queries), [Tokens(d)]), first)
        stated(first, second)
        assert "out of bounds" in capsys.readouterr().out

    def test_colpali_smooth_maximum_counts_padding():
        (queries, _), (positives, _), *_ = make_batch(full=True)
        options = {"temperature": 0.1, "use_smooth_max": True}
        found = []
        for more in (0, 8, 64):
            padded = F.pad(positives, (0, 0, 0, more))
            found.append(colpali.ColbertLoss(**options)(queries, padded))
            mine = ours.ColbertLoss(nn.Identity(), **options).from_tokens(Tokens(queries), [Tokens(padded)])
            same(mine, found[0])
        stated(*found)

    def test_colpali_filter_below_zero(capsys: pytest.CaptureFixture[str]):
        """Scores [[-0.5, -0.45], [0.1, 0.9]]: the suspect -0.45 becomes -0.225 there, -0.675 here."""
        scores = torch.tensor([[-0.5, -0.45], [0.1, 0.9]], dtype=torch.float64)
        turn = torch.tensor([[0.6, 0.8], [0.8, -0.6]], dtype=torch.float64)
        queries, documents = turn[:, None], (scores.T @ turn)[:, None]
        found = []
        for filtering in (False, True):
            options = {"temperature": 0.1, "pos_aware_negative_filtering": filtering}
            found.append(colpali.ColbertLoss(**options)(queries, documents))
            loss = ours.ColbertLoss(nn.Identity(), **options)
            found.append(loss.from_tokens(Tokens(queries), [Tokens(documents)]))
        same(found[0], found[1])
        assert found[3] < found[0] < found[2]
        stated(found[0], found[2])
        stated(found[1], found[3])
        assert "out of bounds" in capsys.readouterr().out

    def test_colpali_missing_negatives():
        """Rows of zeros in place of negatives that are not there."""
        (queries, _), (positives, _), (negatives, _), _ = make_batch(full=True)
        options = {"temperature": 0.1, "in_batch_term_weight": 0.0}
        found = []
        for more in (0, 5):
            stacked = F.pad(negatives[:, None], (0, 0, 0, 0, 0, more))
            found.append(colpali.ColbertNegativeCELoss(**options)(queries, positives, stacked))
            loss = ours.ColbertNegativeCELoss(nn.Identity(), **options)
            documents = [Tokens(positives), Tokens(stacked.flatten(0, 1))]
            same(loss.from_tokens(Tokens(queries), documents), found[0])
        stated(*found)

    def test_colpali_both_ways():
        """Their symmetric loss swaps roles; ours reads the same scores the other way."""
        (queries, _), (positives, _), *_ = make_batch(full=True)
        q, d = Tokens(queries), Tokens(positives)
        peer, mine = colpali.ColbertLoss(), ours.ColbertLoss(nn.Identity())
        with contextlib.redirect_stdout(io.StringIO()):
            theirs = (peer(queries, positives) + peer(positives, queries)) / 2
        same((mine.from_tokens(q, [d]) + mine.from_tokens(d, [q])) / 2, theirs)
        mine.document_to_query_weight = 0.5
        stated(theirs, mine.from_tokens(q, [d]))

    def test_colpali_limits():
        (queries, _), (positives, _), *_ = make_batch(full=True)
        with pytest.raises(RuntimeError):
            colpali.ColbertPairwiseCELoss()(queries[:1], positives[:1])
        with pytest.raises(ValueError, match="batch_size"):
            colpali.ColbertLoss(max_batch_size=2)(queries, positives)
        with pytest.raises(RuntimeError):
            colpali.ColbertSigmoidLoss()(queries, torch.cat([positives, positives]))
        with pytest.raises(TypeError, match="max_batch_size"):
            ours.ColbertLoss(nn.Identity(), max_batch_size=2)

    def test_colpali_half_precision():
        """The same bfloat16 embeddings: theirs sums in bfloat16, ours in float32."""
        (queries, _), (positives, _), *_ = make_batch(full=True)
        q, d = queries.bfloat16(), positives.bfloat16()
        exact = colpali.ColbertLoss()(q.double(), d.double())
        theirs = colpali.ColbertLoss()(q, d).double()
        mine = ours.ColbertLoss(nn.Identity()).from_tokens(Tokens(q), [Tokens(d)])
        same(mine, exact, 1e-5)
        assert abs(theirs - exact) > 1e-3
        stated(theirs, exact)

    def test_pylate():
        """Sums at T, or means at T / query tokens; masked tokens score 0 there and may win."""
        sums = {"normalize_scores": False, "temperature": 1.0}
        features = as_features(make_batch(full=False, positive=True), width=9)
        theirs = Contrastive(Passthrough())(features)
        same(value("ColbertLoss", features, **sums), theirs)
        stated(theirs, value("ColbertLoss", features, **sums))
        same(Contrastive(Passthrough(), size_average=False)(features), 4 * theirs)
        same(Contrastive(Passthrough(), score_mini_batch_size=3)(features), theirs)
        features[0]["attention_mask"] = torch.ones_like(features[0]["attention_mask"])  # as query expansion does
        theirs = Contrastive(Passthrough())(features)
        same(value("ColbertLoss", features, temperature=1 / 6), theirs)
        stated(theirs, value("ColbertLoss", features, temperature=1 / 6))
        features = as_features(make_batch(full=False), width=9)
        theirs, mine = Contrastive(Passthrough())(features), value("ColbertLoss", features, **sums)
        assert abs(theirs - mine) > 1e-4
        stated(theirs, mine)

    def test_pylate_lists_of_negatives():
        """A column of lists, row by row: refused there, the same as a column per negative here."""
        features = as_features(make_batch(full=False, positive=True), width=9)
        lists = {k: torch.stack([f[k] for f in features[2:]], 1).flatten(0, 1) for k in features[1]}
        with pytest.raises(RuntimeError, match="equal size"):
            Contrastive(Passthrough())([*features[:2], lists])
        same(value("ColbertLoss", [*features[:2], lists]), value("ColbertLoss", features))

    def test_pylate_copies():
        features = as_features(with_copy(make_batch(full=True))[:2])
        theirs = Contrastive(Passthrough())(features)
        sums = {"normalize_scores": False, "temperature": 1.0}
        same(value("ColbertLoss", features, mask_duplicate_documents=False, **sums), theirs)
        mine = value("ColbertLoss", features, **sums)
        assert mine < theirs
        stated(theirs, mine)

    def test_pylate_cached_gradient():
        """Batch size times the gradient of the mean, which it logs unless ``size_average=False``."""

        def gradient(make: type[nn.Module], rows: int, **options: object) -> Tensor:
            model, batch = Passthrough(), make_batch(full=False, positive=True)
            features = [{k: v[:rows] for k, v in f.items()} for f in as_features(batch, width=9)]
            make(model, **options)(features).backward()
            return model.turn.grad

        sums = {"normalize_scores": False, "temperature": 1.0}
        for rows in (2, 4):
            true = gradient(Contrastive, rows)
            for average in (True, False):
                theirs = gradient(CachedContrastive, rows, mini_batch_size=1, size_average=average)
                torch.testing.assert_close(theirs, rows * true)
            torch.testing.assert_close(gradient(ours.CachedColbertLoss, rows, mini_batch_size=1, **sums), true)

    def test_pylate_distillation():
        features = as_features(make_batch(full=False, positive=True), width=9)
        joined = {k: torch.stack([f[k] for f in features[1:]], 1).flatten(0, 1) for k in features[1]}
        flat = [features[0], joined]
        spread = TEACHER.amax(1, keepdim=True) - TEACHER.amin(1, keepdim=True)
        scaled = (TEACHER - TEACHER.amin(1, keepdim=True)) / spread
        default, plain = (Distillation(Passthrough(), normalize_scores=n)(flat, TEACHER) for n in (True, False))
        mine = value("ColbertDistillationLoss", flat, TEACHER)
        raw = value("ColbertDistillationLoss", flat, TEACHER, normalize_teacher_scores=False)
        same(raw, plain)
        same(mine, Distillation(Passthrough(), normalize_scores=False)(flat, scaled))
        stated(plain, raw)
        stated(default, mine)

else:
    from sentence_transformers.multi_vector_encoder import losses as peers
    from sentence_transformers.multi_vector_encoder.scoring import mean_colbert_scores

    def ranking(features: list[dict[str, Tensor]], **options: object) -> Tensor:
        return peers.MultiVectorMultipleNegativesRankingLoss(Passthrough(), **options)([dict(f) for f in features])

    def test_ranking():
        features = as_features(make_batch(full=False))
        theirs = ranking(features)
        mine = value("ColbertLoss", features, temperature=1.0, normalize_scores=False)
        same(mine, theirs)
        stated(theirs, mine)
        theirs = ranking(features, scale=50.0, similarity_fct=mean_colbert_scores)
        same(value("ColbertLoss", features), theirs)
        stated(theirs, value("ColbertLoss", features))

    def test_ranking_copies():
        features = as_features(with_copy(make_batch(full=False))[:2])
        theirs, sums = ranking(features), {"temperature": 1.0, "normalize_scores": False}
        same(value("ColbertLoss", features, mask_duplicate_documents=False, **sums), theirs)
        stated(theirs, value("ColbertLoss", features, **sums))

    def test_cached_gradient():
        """Theirs is right."""
        features, grads = as_features(make_batch(full=False)), []
        sums = {"temperature": 1.0, "normalize_scores": False}
        for make, options in (
            (peers.CachedMultiVectorMultipleNegativesRankingLoss, {}),
            (ours.CachedColbertLoss, sums),
        ):
            model = Passthrough()
            make(model, mini_batch_size=1, **options)([dict(f) for f in features]).backward()
            grads.append(model.turn.grad)
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("student", "teacher"), [(1.0, 1.0), (0.25, 0.25), (2.0, 0.5)])
    def test_distillation(student: float, teacher: float):
        """Theirs is ours times the square of the student's temperature."""
        features = as_features(make_batch(full=False))
        peer = peers.MultiVectorDistillKLDivLoss(
            Passthrough(), student_temperature=student, teacher_temperature=teacher
        )
        theirs = peer([dict(f) for f in features], TEACHER)
        options = {"normalize_teacher_scores": False, "teacher_temperature": teacher, "temperature": student}
        mine = value("ColbertDistillationLoss", features, TEACHER, **options)
        same(theirs, mine * student**2)
        stated(theirs, mine)

    def test_what_has_a_twin():
        """Those the page speaks of are all there are."""
        for name in peers.__all__:
            assert name in PAGE
