"""A few of many explicit negatives per step: which are drawn, from which generator, and what is encoded."""

from __future__ import annotations

import pytest
import torch

from st_colbert_losses import ColbertDistillationLoss, ColbertLoss, ColbertNegativeCELoss
from st_colbert_losses.draws import draw_negatives
from st_colbert_losses.features import join_rows, row_bounds, select_rows
from tests import reference
from tests.batches import Passthrough, make_batch
from tests.encoder import Encoder, batch

ROWS = 6


def numbered(*per_row: int) -> list[dict]:
    """Negatives that tell where they come from: id 100 * row + number of the negative, in columns of other widths."""
    first, columns = 0, [{"input_ids": torch.zeros(ROWS, 2, dtype=torch.long)}] * 2
    for i, n in enumerate(per_row):
        ids = (100 * torch.arange(ROWS)[:, None] + first + torch.arange(n)).flatten()
        wide = ids[:, None].repeat(1, 2 + i)
        columns.append({"input_ids": wide, "attention_mask": torch.ones_like(wide), "task": "document"})
        first += n
    return columns


@pytest.mark.parametrize("per_row", [(5,), (1, 1, 1, 1, 1), (2, 3)], ids=str)
def test_draws_without_repetition(per_row):
    """Each row gets k different ones of its own, every one of them about as often."""
    torch.manual_seed(0)
    seen = torch.zeros(5)
    for _ in range(200):
        features, drawn = draw_negatives(numbered(*per_row), 2)
        assert len(features) == 3
        assert features[2]["task"] == "document"
        ids = features[2]["input_ids"].view(ROWS, 2, -1)[..., 0]
        assert torch.equal(ids // 100, torch.arange(ROWS)[:, None].expand(ROWS, 2))
        assert torch.equal(ids % 100, drawn)
        assert (ids[:, 0] < ids[:, 1]).all()
        seen += torch.bincount(drawn.flatten(), minlength=5)
    expected = 200 * ROWS * 2 / 5  # standard deviation of a binomial: 17
    assert (seen - expected).abs().max() < 5 * 17


def test_padding_is_not_attended():
    features, _ = draw_negatives(numbered(1, 1, 1), 2)
    column = features[2]
    assert column["input_ids"].shape[1] == 4
    widths = 2 + column["input_ids"][:, 0] % 100
    assert torch.equal(column["attention_mask"].sum(1), widths)


def test_few_negatives_stay_as_they_are():
    features = numbered(1, 1)
    assert draw_negatives(features, 2) == (features, None)
    assert draw_negatives(features[:2], 2) == (features[:2], None)


def test_follows_the_random_state(monkeypatch):
    """The same from the same state; another on another process."""
    features = numbered(5)

    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        return draw_negatives(features, 2)[1]

    first = draw()
    assert torch.equal(first, draw())
    monkeypatch.setattr("st_colbert_losses.draws.rank", lambda: 1)
    assert not torch.equal(first, draw())


def test_only_the_drawn_are_encoded_and_all_in_evaluation():
    encoder, features = Encoder(), batch(rows=5, columns=6)
    loss = ColbertLoss(encoder, negatives_per_step=2)
    loss(features)
    assert [len(rows) for rows in encoder.seen] == [5, 5, 10]
    encoder.seen.clear()
    with torch.no_grad():
        assert loss(features) == ColbertLoss(encoder)(features)
    loss.negatives_per_step = None
    encoder.seen.clear()
    loss(features)
    assert [len(rows) for rows in encoder.seen] == [5] * 6


def test_the_loss_is_that_of_the_drawn():
    torch.manual_seed(2)
    rows = make_batch([2, 3, 1], [[2, 3, 1, 2, 2], [3, 3, 2, 1, 1], [1, 2, 3, 2, 1]])
    loss = ColbertNegativeCELoss(Passthrough(), temperature=0.3, negatives_per_step=2)
    torch.manual_seed(5)
    features = pad(rows.features)
    drawn = draw_negatives(features, 2)[1]
    torch.manual_seed(5)
    value = loss([{key: column[key] for key in ("vectors", "scored")} for column in features])
    for row, chosen in zip(rows.rows, drawn.tolist(), strict=True):
        row.documents = [row.documents[0], *(row.documents[1 + n] for n in chosen)]
        row.document_ids = [None] * 3
        row.query_ids = None
    expected = reference.loss("ColbertNegativeCELoss", rows.rows, temperature=0.3)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)


def pad(features: list[dict]) -> list[dict]:
    width = max(column["vectors"].shape[1] for column in features)
    for column in features:
        missing = width - column["vectors"].shape[1]
        column["vectors"] = torch.nn.functional.pad(column["vectors"], (0, 0, 0, missing))
        column["scored"] = torch.nn.functional.pad(column["scored"], (0, missing))
    return features


def test_the_teachers_scores_are_drawn_too():
    seen = {}

    class Spy(ColbertDistillationLoss):
        def _read_labels(self, labels, rows):
            seen["labels"] = labels
            return super()._read_labels(labels, rows)

    loss = Spy(Encoder(), negatives_per_step=2)
    teacher = torch.arange(30.0).view(5, 6)
    torch.manual_seed(4)
    features = batch(rows=5, columns=7)
    torch.manual_seed(4)
    drawn = draw_negatives(features, 2)[1]
    torch.manual_seed(4)
    loss(features, teacher)
    expected = torch.stack([torch.tensor([t[0], *t[1:][d]]) for t, d in zip(teacher, drawn, strict=True)])
    assert torch.equal(seen["labels"], expected)


def test_images_of_any_size_are_drawn_whole():
    """Patches without a row axis go with their grid."""

    def column(start: int, images: list[int]) -> dict:
        patches = [4 * n for n in images]
        return {
            "input_ids": torch.arange(start, start + len(images))[:, None],
            "attention_mask": torch.ones(len(images), 1, dtype=torch.long),
            "pixel_values": torch.cat([torch.full((n, 3), float(start + i)) for i, n in enumerate(patches)]),
            "image_grid_thw": torch.tensor([[1, 2, 2 * n] for n in images]),
        }

    joined = join_rows([column(0, [1, 2]), column(2, [3, 1])])
    chosen = select_rows(joined, row_bounds(joined, 4), [2, 0])
    assert chosen["input_ids"].flatten().tolist() == [2, 0]
    assert chosen["pixel_values"][:, 0].tolist() == [2.0] * 12 + [0.0] * 4
    assert chosen["image_grid_thw"][:, 2].tolist() == [6, 2]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [("pixel_values", torch.zeros(ROWS, 3, 2)), ("image_grid_thw", torch.ones(ROWS, 3)), ("modality", "image")],
)
def test_columns_that_hold_other_things_are_refused(key, value, first):
    """An image column joined with a text column would be encoded without its images, or as a text."""
    features = numbered(1, 1, 1)
    features[2 if first else 3][key] = value
    with pytest.raises(ValueError, match=rf"Features: got {key!r} in 1 of 3 .*expected .*negatives_per_step=None"):
        draw_negatives(features, 2)


def test_columns_of_two_modalities_are_refused():
    features = numbered(1, 1, 1)
    for column, modality in zip(features[2:], ("image", "text", "text"), strict=True):
        column["modality"] = modality
    with pytest.raises(ValueError, match=r"got 'modality' of 'image' and 'text' in .*negatives_per_step=None"):
        draw_negatives(features, 2)


def test_numbers_that_belong_to_no_row_stay():
    features = numbered(1, 1, 1)
    for column in features[2:]:
        column["scale"] = torch.tensor(2.0)
    assert draw_negatives(features, 2)[0][2]["scale"] == 2


def test_columns_that_do_not_fit_are_refused():
    features = numbered(1, 1, 1)
    for i, column in enumerate(features[2:]):
        column["pixel_values"] = torch.zeros(ROWS, 3 + i, 2)
    with pytest.raises(ValueError, match=r"got 'pixel_values' of shapes .*one column of lists"):
        draw_negatives(features, 2)
