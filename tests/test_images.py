"""Page images through tiny random ColPali and ColQwen2 models: cut by row, told apart by pixels."""

from __future__ import annotations

import pytest
import torch

import st_colbert_losses
from tests.models import PYLATE
from tests.test_cached import assert_same, gradients
from tests.test_losses import NAMES

if not PYLATE:  # page images are world M's
    from tests.images import page, page_retriever

    PAGES = [page("rain\nJan", (60, 80)), page("tea", (120, 40)), page("rain\nJan", (60, 80)), page("fish", (50, 50))]
    NEGATIVES = [page(text, (70, 60)) for text in ("wind", "sun", "snow", "fog")]
    QUERIES = ["rain in january", "price of tea", "how much rain", "fish"]

    @pytest.fixture(scope="module", params=["colpali", "colqwen2"])
    def retriever(request, tmp_path_factory):
        return page_retriever(request.param, tmp_path_factory.mktemp(request.param)).double()

    @pytest.fixture(scope="module")
    def features(retriever):
        return [
            retriever.preprocess(inputs, task="document" if i else "query")
            for i, inputs in enumerate([QUERIES, PAGES, NEGATIVES])
        ]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        "mini_batch", [{"mini_batch_size": 1}, {"mini_batch_size": 3}, {"mini_batch_num_tokens": 80}]
    )
    def test_cached_equals_direct(name, mini_batch, retriever, features):
        direct = getattr(st_colbert_losses, name)(retriever, temperature=0.3)
        cached = getattr(st_colbert_losses, f"Cached{name}")(retriever, temperature=0.3, **mini_batch)
        first, second = direct(features), cached(features)
        torch.testing.assert_close(first, second, rtol=1e-7, atol=0)  # rotary angles are computed in float32
        assert_same(gradients(direct, first), gradients(cached, second), 1e-6)

    def test_the_vision_tower_learns(retriever, features):
        loss = st_colbert_losses.CachedColbertLoss(retriever, temperature=0.3, mini_batch_size=2)
        loss(features).backward()
        moved = [name for name, p in retriever.named_parameters() if p.grad is not None and p.grad.abs().max() > 0]
        assert any("vision" in name or "visual" in name for name in moved)

    def test_copies_of_a_page_are_no_negatives(retriever, features):
        """Pages 0 and 2 have the same pixels: neither is a negative of the other's query, until a pixel changes."""
        seen = {}

        def spy(scores, temperature):
            seen["left out"] = (scores.pool == -torch.inf).tolist()
            return scores.positive

        loss = st_colbert_losses.LateInteractionLoss(retriever, spy)
        loss(features[:2])
        apart = [[row == column for column in range(4)] for row in range(4)]
        together = [[{row, column} == {0, 2} or row == column for column in range(4)] for row in range(4)]
        assert seen["left out"] == together
        changed = dict(features[1])
        changed["pixel_values"] = changed["pixel_values"].clone()
        changed["pixel_values"][2, 1] += 0.5
        loss([features[0], changed])
        assert seen["left out"] == apart
