"""Spans written out by hand, and the vectors that end up in them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.model.image_tokens import expand, is_image, place
from deepinfer_jax.model.images import ImageGrid, image_grid

PICTURE = 60  # placeholder id
VISION = VisionConfig(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    intermediate_size=8,
    patch_size=2,
    downsample_ratio=3,
    max_image_tokens=40,
    min_pixels=4,
    image_token_id=PICTURE,
)
MODEL = dataclasses.replace(presets.tiny(), vision=VISION)  # a vocabulary of 64
WIDE = ImageGrid(rows=4, columns=8, patch_size=2, downsample_ratio=3)  # 2 x 3 cells
SMALL = ImageGrid(rows=1, columns=3, patch_size=2, downsample_ratio=3)  # 1 x 1 cells


def test_two_spans_and_a_placeholder_left_over():
    prompt = expand([7, PICTURE, 8, PICTURE, PICTURE], [WIDE, SMALL], MODEL)
    first, rest = 66, 65
    tokens = [7, first, *[rest] * 9, 8, first, *[rest] * 3, PICTURE]
    assert prompt.tokens.tolist() == tokens
    # 1 text, 2 image, 3 start, 4 end, 5 newline
    types = [1, 3, 2, 2, 2, 5, 2, 2, 2, 5, 4, 1, 3, 2, 5, 4, 1]
    assert prompt.types.tolist() == types
    assert prompt.cell.tolist() == [0, 0, 0, 1, 2, 0, 3, 4, 5, *[0] * 8]
    assert prompt.image[13] == 1 and prompt.image.sum() == 1
    inside = [0, *[1] * 10, 0, *[1] * 4, 0]
    assert is_image(prompt.types).astype(int).tolist() == inside


def test_span_length_is_the_grids_number_of_tokens():
    model = dataclasses.replace(MODEL, vision=presets.v41_flash().vision)
    grid = image_grid(640, 480, model.vision)
    prompt = expand([model.vision.image_token_id], [grid], model)
    assert len(prompt.tokens) == 206  # the released table


def test_text_alone():
    assert expand([], [], MODEL).tokens.shape == (0,)
    assert expand([3, 4], [], MODEL).tokens.tolist() == [3, 4]


def test_refusals():
    with pytest.raises(ValueError, match="1 image placeholders for 2 images"):
        expand([PICTURE], [SMALL, SMALL], MODEL)
    with pytest.raises(ValueError, match="no vision part"):
        expand([PICTURE], [SMALL], presets.tiny())


def test_vectors_stand_where_the_span_says():
    """A step that begins inside the first image: features follow the cell, not the rank."""
    prompt = expand([7, PICTURE, 8, PICTURE], [WIDE, SMALL], MODEL)
    step = slice(3, None)
    columns = (prompt.types, prompt.image, prompt.cell)
    types, image, cell = (jnp.asarray(column[None, step]) for column in columns)
    features = jnp.arange(2 * 6.0).reshape(2, 6, 1) + 100
    params = {"image_start": jnp.full(1, 1.0), "image_end": jnp.full(1, 2.0)}
    params["image_newline"] = jnp.full(1, 3.0)
    text = jnp.full((1, types.shape[1], 1), -1, jnp.bfloat16)
    rows = jax.jit(place)(params, text, features, types, image, cell)
    assert rows.dtype == jnp.bfloat16
    wanted = [101, 102, 3, 103, 104, 105, 3, 2, -1, 1, 106, 3, 2]
    np.testing.assert_array_equal(rows[0, :, 0].astype(jnp.float32), wanted)
