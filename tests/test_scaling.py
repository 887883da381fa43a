"""The arithmetic of docs/scaling.md against the bytes that real processes hand to their collectives."""

from __future__ import annotations

import pytest
import torch

from benchmarks.scaling import MODELS, PAGE, Setup, ranks_where_sharing_costs_more, sent_for_gradients, table
from st_colbert_losses import CachedColbertLoss, ColbertLoss
from tests.encoder import Encoder
from tests.ranks import recorded_collectives, run_ranks


def check_rank(rank: int, world: int) -> None:
    for form, rows, tokens, columns in ((ColbertLoss, 3, 7, 1), (ColbertLoss, 2, 5, 2), (CachedColbertLoss, 4, 6, 1)):
        features = [
            {
                "input_ids": torch.randint(0, 50, (rows, 3 if i == 0 else tokens)),
                "attention_mask": torch.ones(rows, 3 if i == 0 else tokens, dtype=torch.long),
            }
            for i in range(1 + columns)
        ]
        loss = form(Encoder(), temperature=0.5, gather_across_devices=True)
        with recorded_collectives() as collectives:
            loss(features).backward()
        given = {name: sum(c.bytes for c in collectives if c.name == name) for name in ("all_gather", "all_reduce")}
        setup = Setup(world, rows, tokens, columns, dimensions=4)  # as the encoder has
        assert given == {"all_gather": setup.gathered, "all_reduce": setup.reduced}


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_those_of_real_processes(world, tmp_path):
    run_ranks(check_rank, world, tmp_path, world)


def test_bytes_of_a_ring():
    """Four ranks, by hand: 3 others get each of my bytes; a reduction goes round twice in quarters."""
    setup = Setup(ranks=4, rows=2, tokens=3, dimensions=5)
    vectors = 2 * 3 * 5 * 4
    gathered = vectors + 2 * 3 + 2 * 4 * 8 + (1 + 2 + 3) * 8
    assert setup.sent == 3 * gathered + 2 * 3 * (4 * vectors // 4)
    assert sent_for_gradients(4, 100) == 2 * 3 * (100 * 4 // 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_where_documents_cost_more(name):
    setup, parameters = MODELS[name]
    limit = ranks_where_sharing_costs_more(setup, parameters)
    for ranks, more in ((int(limit), False), (int(limit) + 1, True)):
        here = Setup(ranks, setup.rows, setup.tokens)
        assert (here.sent > sent_for_gradients(ranks, parameters)) is more


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")
