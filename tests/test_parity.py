"""Values and gradients against the losses of the libraries that users come from: their code, not a copy of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import st_colbert_losses as ours
from st_colbert_losses import ColbertLoss, Tokens
from tests.models import PYLATE, assert_same_gradients, columns, encoded, gradients, tiny_model

QUERIES = ["what sings", "what eats red fish", "one blue two", "what cat sleeps three"]
POSITIVES = ["bird sings , sings", "the red cat eats fish .", "three blue dog two one", "six cat sleeps"]
# One wider and one narrower than the positives, so that columns differ in width wherever a library lets them.
NEGATIVES = [
    ["dog", "blue fish", "ten", "red"],
    ["seven eight nine ten one two", "bird sleeps", "dog eats red , blue , green fish .", "cat"],
]

# Peers and we compute float32 sums in another order: some roundings of 6e-8, more after a backward pass.
FLOAT32_VALUE, FLOAT32_GRADIENT = 1e-6, 1e-5
# Likewise in float64, 1e-16 a rounding; a temperature of 0.02 magnifies it 50 times.
FLOAT64 = 1e-12
# colpali-engine's softplus, torch's, returns x for log(1 + exp(x)) above 20, where a sharp temperature gets: exp(-20).
SOFTPLUS = 3e-9

if PYLATE:
    from colpali_engine.loss import late_interaction_losses as colpali
    from pylate.losses import Contrastive

    IN_BATCH = ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"]
    EXPLICIT = ["ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"]

    @pytest.fixture(autouse=True)
    def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
        """The peers' reference scores, whatever kernels are installed."""
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")

    def unit_vectors(*shape: int, positive: bool) -> Tensor:
        """Random unit vectors in float64; all similarities above 0 where asked for."""
        vectors = torch.randn(*shape, dtype=torch.float64)
        return F.normalize(vectors.abs() if positive else vectors, dim=-1).requires_grad_()

    def batch(*, positive: bool, b: int = 5, n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, positives and n negatives per row: 4, 7 and 6 tokens each, all of them real."""
        shapes = [(b, 4, 6), (b, 7, 6), (b, n, 6, 6)]
        queries, positives, negatives = (unit_vectors(*shape, positive=positive) for shape in shapes)
        return queries, positives, negatives

    def assert_parity(mine: Tensor, theirs: Tensor, leaves: list[Tensor], tolerance: float = FLOAT64) -> None:
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        expected = torch.autograd.grad(theirs, leaves, retain_graph=True)
        largest = max(float(g.abs().max()) for g in expected)
        assert largest > 0
        for got, want in zip(torch.autograd.grad(mine, leaves), expected, strict=True):
            assert float((got - want).abs().max()) <= tolerance * largest

    def both(name: str, options: dict, queries: Tensor, positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Our value and colpali-engine's."""
        mine, theirs = getattr(ours, name)(nn.Identity(), **options), getattr(colpali, name)(**options)
        if name in IN_BATCH:
            return mine.from_tokens(Tokens(queries), [Tokens(positives)]), theirs(queries, positives)
        value = mine.from_tokens(Tokens(queries), [Tokens(positives), Tokens(negatives.flatten(0, 1))])
        return value, theirs(queries, positives, negatives)

    @pytest.mark.parametrize("positive", [False, True], ids=["any-sign", "positive"])
    @pytest.mark.parametrize("name", IN_BATCH + EXPLICIT)
    def test_colpali_defaults(name: str, positive: bool) -> None:
        queries, positives, negatives = batch(positive=positive)
        mine, theirs = both(name, {}, queries, positives, negatives)
        assert_parity(mine, theirs, [queries, positives] + [negatives] * (name in EXPLICIT), SOFTPLUS)

    @pytest.mark.parametrize("filtering", [False, True], ids=["unfiltered", "filtered"])
    @pytest.mark.parametrize("smooth", [False, True], ids=["max", "smooth"])
    @pytest.mark.parametrize("normalize", [False, True], ids=["sums", "means"])
    @pytest.mark.parametrize("name", IN_BATCH + EXPLICIT)
    def test_colpali_options(name: str, normalize: bool, smooth: bool, filtering: bool) -> None:
        """Filtering is compared where scores are positive: below 0 their factor raises a score, ours lowers it."""
        queries, positives, negatives = batch(positive=filtering)
        options = {
            "temperature": 0.2 if normalize else 0.8,  # soft enough that every score matters
            "normalize_scores": normalize,
            "use_smooth_max": smooth,
            "tau": 0.2,
            "pos_aware_negative_filtering": filtering,
            "filter_threshold": 0.9,
            "filter_factor": 0.6,
        }
        if name in EXPLICIT:
            options["in_batch_term_weight"] = 0.3
        mine, theirs = both(name, options, queries, positives, negatives)
        assert_parity(mine, theirs, [queries, positives] + [negatives] * (name in EXPLICIT))
        if filtering:  # the filter met something in this batch
            unfiltered, _ = both(
                name, {**options, "pos_aware_negative_filtering": False}, queries, positives, negatives
            )
            assert float((unfiltered - theirs).detach().abs()) > 1e-3

    @pytest.mark.parametrize("weight", [0.0, 1.0])
    @pytest.mark.parametrize("name", EXPLICIT)
    def test_colpali_one_term_alone(name: str, weight: float) -> None:
        queries, positives, negatives = batch(positive=False)
        mine, theirs = both(name, {"in_batch_term_weight": weight}, queries, positives, negatives)
        used = [queries, positives] + [negatives] * (weight == 0)
        assert_parity(mine, theirs, used, SOFTPLUS)

    @pytest.mark.parametrize("name", EXPLICIT)
    def test_colpali_one_column_per_negative(name: str) -> None:
        """N columns of one negative per row are N negatives per row, of other widths too."""
        queries, positives, negatives = batch(positive=False)
        loss, theirs = getattr(ours, name)(nn.Identity()), getattr(colpali, name)()
        documents = [Tokens(positives), *(Tokens(column) for column in negatives.unbind(1))]
        documents[1] = Tokens(F.pad(documents[1].vectors, (0, 0, 0, 2)))
        mine = loss.from_tokens(Tokens(queries), documents)
        assert_parity(mine, theirs(queries, positives, negatives), [queries, positives, negatives], SOFTPLUS)

    @pytest.mark.parametrize("filtering", [False, True], ids=["unfiltered", "filtered"])
    @pytest.mark.parametrize("name", ["ColbertLoss", "ColbertPairwiseCELoss"])
    def test_colpali_negatives_in_the_pool(name: str, filtering: bool) -> None:
        """Their in-batch losses take documents beyond the positives: what our negative columns add to the pool."""
        queries, positives, _ = batch(positive=filtering)
        negatives = unit_vectors(10, 7, 6, positive=filtering)
        options = {"temperature": 0.2, "pos_aware_negative_filtering": filtering}
        loss = getattr(ours, name)(nn.Identity(), **options)
        mine = loss.from_tokens(Tokens(queries), [Tokens(positives), Tokens(negatives)])
        theirs = getattr(colpali, name)(**options)(queries, torch.cat([positives, negatives]))
        assert_parity(mine, theirs, [queries, positives, negatives])

    @pytest.mark.parametrize("name", IN_BATCH + EXPLICIT)
    def test_colpali_zero_padding(name: str) -> None:
        """What a ColPali model returns: ragged rows, padded with zeros, here with similarities above 0."""
        queries, positives, negatives = batch(positive=True)
        q = queries * (torch.arange(4) < torch.tensor([4, 2, 3, 1, 4])[:, None])[..., None]
        d = positives * (torch.arange(7) < torch.tensor([1, 7, 5, 6, 3])[:, None])[..., None]
        n = negatives * (torch.arange(6) < torch.randint(1, 7, (5, 3, 1)))[..., None]
        mine, theirs = both(name, {"temperature": 0.2}, q, d, n)
        assert_parity(mine, theirs, [queries, positives] + [negatives] * (name in EXPLICIT))

    def contrastive_batch(model: nn.Module, negatives: int) -> list[dict[str, Tensor]]:
        """A batch on which PyLate's scores are what they say: it lets masked tokens score 0, which must not win."""
        documents = [POSITIVES, *NEGATIVES[:negatives]]
        texts = [text for column in documents for text in column]
        for query in encoded(model, QUERIES, is_query=True):
            for document in encoded(model, texts, is_query=False):
                assert float((query @ document.T).max(1).values.min()) > 0
        return columns(model, QUERIES, *documents)

    @pytest.mark.parametrize("temperature", [1.0, 0.3])
    @pytest.mark.parametrize("negatives", [0, 1, 2])
    @pytest.mark.parametrize("expansion", [False, True], ids=["plain", "expansion"])
    def test_pylate_contrastive(expansion: bool, negatives: int, temperature: float) -> None:
        model = tiny_model(expansion=expansion)
        features = contrastive_batch(model, negatives)
        theirs = Contrastive(model, temperature=temperature)([dict(f) for f in features])
        loss = ColbertLoss(model, temperature=temperature, normalize_scores=False, mask_duplicate_documents=False)
        mine = loss(features)
        torch.testing.assert_close(mine, theirs, rtol=FLOAT32_VALUE, atol=FLOAT32_VALUE)
        assert_same_gradients(gradients(mine, model), gradients(theirs, model), FLOAT32_GRADIENT)

    def test_pylate_temperature_of_means() -> None:
        """The one conversion: T of means = T of sums / query tokens."""
        model = tiny_model(expansion=True)
        features = contrastive_batch(model, 1)
        theirs = Contrastive(model, temperature=1.0)([dict(f) for f in features])
        mine = ColbertLoss(model, temperature=1.0 / model.query_length, mask_duplicate_documents=False)(features)
        torch.testing.assert_close(mine, theirs, rtol=FLOAT32_VALUE, atol=FLOAT32_VALUE)
        assert_same_gradients(gradients(mine, model), gradients(theirs, model), FLOAT32_GRADIENT)


if not PYLATE:
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.multi_vector_encoder.scoring import mean_colbert_scores

    EXPANSIONS = {
        "plain": None,
        "expanded": {"strategy": "fixed", "length": 9},
        "attended": {"strategy": "fixed", "length": 9, "attend": True},
        "at-least": {"strategy": "min", "length": 5},
    }

    def model_with(expansion: str) -> nn.Module:
        """A tiny model with punctuation left out of documents, and with query expansion."""
        model = tiny_model()
        (mask,) = (module for module in model if isinstance(module, MultiVectorMask))
        mask.skiplist_words = [".", ","]
        mask.resolve_with_tokenizer(model.tokenizer)
        model[0].query_expansion = EXPANSIONS[expansion]
        return model

    @pytest.mark.parametrize("scale", [1.0, 3.0])
    @pytest.mark.parametrize("negatives", [0, 1, 2])
    @pytest.mark.parametrize("expansion", EXPANSIONS)
    def test_multiple_negatives_ranking(expansion: str, negatives: int, scale: float) -> None:
        model = model_with(expansion)
        features = columns(model, QUERIES, POSITIVES, *NEGATIVES[:negatives])
        assert len({f["input_ids"].shape[1] for f in features[1:]}) == 1 + negatives  # widths differ
        theirs = MultiVectorMultipleNegativesRankingLoss(model, scale=scale)(features)
        options = {"normalize_scores": False, "mask_duplicate_documents": False}
        mine = ColbertLoss(model, temperature=1 / scale, **options)(features)
        torch.testing.assert_close(mine, theirs, rtol=FLOAT32_VALUE, atol=FLOAT32_VALUE)
        assert_same_gradients(gradients(mine, model), gradients(theirs, model), FLOAT32_GRADIENT)

    @pytest.mark.parametrize("expansion", EXPANSIONS)
    def test_multiple_negatives_ranking_over_means(expansion: str) -> None:
        """Normalised scores are their MeanMaxSim, queries of different lengths included."""
        model = model_with(expansion)
        features = columns(model, QUERIES, POSITIVES, *NEGATIVES)
        peer = MultiVectorMultipleNegativesRankingLoss(model, scale=20.0, similarity_fct=mean_colbert_scores)
        theirs, mine = peer(features), ColbertLoss(model, temperature=0.05, mask_duplicate_documents=False)(features)
        torch.testing.assert_close(mine, theirs, rtol=FLOAT32_VALUE, atol=FLOAT32_VALUE)
        assert_same_gradients(gradients(mine, model), gradients(theirs, model), FLOAT32_GRADIENT)
