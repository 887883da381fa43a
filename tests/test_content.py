"""Which inputs are the same input, and what follows for the negatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from st_colbert_losses.content import content_keys


def text(*inputs: list[int], left: int = 0, right: int = 0) -> dict[str, torch.Tensor]:
    """Token ids with garbage under the padding."""
    width = left + max(map(len, inputs)) + right
    ids, attended = torch.randint(1, 9, (len(inputs), width)), torch.zeros(len(inputs), width, dtype=torch.long)
    for i, tokens in enumerate(inputs):
        ids[i, left : left + len(tokens)] = torch.tensor(tokens)
        attended[i, left : left + len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": attended}


@settings(deadline=None)
@given(
    inputs=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=6),
    left=st.integers(0, 3),
    right=st.integers(0, 3),
)
def test_keys_are_equal_where_attended_ids_are(inputs, left, right):
    first = content_keys(text(*inputs), len(inputs))
    second = content_keys(text(*inputs, left=left, right=right), len(inputs))
    expected = [[a == b for b in inputs] for a in inputs]
    assert (first[:, None] == second).tolist() == expected


def test_a_million_inputs_have_a_million_keys():
    ids = torch.cartesian_prod(*[torch.arange(100)] * 3)
    keys = content_keys({"input_ids": ids}, len(ids))
    assert len(keys.unique()) == len(ids)


def test_pixels_tell_inputs_with_equal_ids_apart():
    pixels = torch.rand(3, 3, 4, 4)
    pixels[2] = pixels[0]
    features = text([1, 2], [1, 2], [1, 2]) | {"pixel_values": pixels}
    keys = content_keys(features, 3)
    assert keys[0] == keys[2] != keys[1]
    only_pixels = content_keys({"pixel_values": pixels}, 3)
    assert only_pixels[0] == only_pixels[2] != only_pixels[1]
    other_text = content_keys(text([1, 2], [1, 2], [1, 3]) | {"pixel_values": pixels}, 3)
    assert other_text[0] != other_text[2]
    assert content_keys({"pixel_values": -torch.zeros(1, 3)}, 1) == content_keys(
        {"pixel_values": torch.zeros(1, 3)}, 1
    )


@pytest.mark.parametrize(("key", "shape"), [("input_values", (3, 40)), ("input_features", (3, 8, 5))])
def test_sound_tells_inputs_with_equal_ids_apart(key, shape):
    sound = torch.rand(shape)
    sound[2] = sound[0]
    keys = content_keys(text([1, 2], [1, 2], [1, 2]) | {key: sound}, 3)
    assert keys[0] == keys[2] != keys[1]
    only_sound = content_keys({key: sound}, 3)
    assert only_sound[0] == only_sound[2] != only_sound[1]


@pytest.mark.parametrize("padded", [False, True])
def test_pixels_in_flattened_patches(padded):
    """ColQwen2: patches of all images one after the other, or padded to the longest, with a grid per image."""
    grid = torch.tensor([[1, 2, 2], [1, 1, 3], [1, 2, 2]])
    patches = [torch.rand(4, 5), torch.rand(3, 5)]
    patches.append(patches[0])
    values = torch.nn.utils.rnn.pad_sequence(patches, batch_first=True) if padded else torch.cat(patches)
    keys = content_keys({"pixel_values": values, "image_grid_thw": grid}, 3)
    assert keys[0] == keys[2] != keys[1]
    reshaped = content_keys({"pixel_values": torch.cat(patches), "image_grid_thw": grid.roll(1, 1)}, 3)
    assert reshaped[0] != keys[0]  # the same patches in another shape are another image


def test_unknown_content():
    assert content_keys({"vectors": torch.rand(2, 3, 4)}, 2) is None
    assert content_keys({"input_ids": torch.ones(1, 6)}, 2) is None  # flattened rows
    assert content_keys({"pixel_values": torch.rand(5, 3)}, 2) is None  # patches without a grid
    grid = torch.tensor([[1, 1, 1]] * 3)
    assert content_keys({"pixel_values": torch.rand(3, 3), "image_grid_thw": grid}, 2) is None  # two images in a row
