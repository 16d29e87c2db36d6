"""Grid sizes: the released table, the rules as properties, Pillow, and NeMo's planner."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import presets
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.model.images import contained_size, image_grid

RELEASED = presets.v41_flash().vision
SIDES = st.integers(1, 20_000)


def vision(**changes):
    """A small encoder's configuration."""
    return VisionConfig(
        **{
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
            "intermediate_size": 8,
            "patch_size": 2,
            "downsample_ratio": 3,
            "max_image_tokens": 40,
            "min_pixels": 100,
            "image_token_id": 60,
        }
        | changes
    )


CONFIGS = st.builds(
    vision,
    patch_size=st.integers(1, 16),
    downsample_ratio=st.integers(1, 4),
    max_image_tokens=st.integers(4, 1500),
    min_pixels=st.integers(1, 300_000),
)


@pytest.mark.parametrize(
    ("size", "cells", "pixels", "patches", "tokens"),
    [
        ((224, 224), (13, 13), (546, 546), (39, 39), 184),
        ((640, 480), (12, 16), (644, 490), (46, 35), 206),
        ((1024, 1024), (25, 25), (1036, 1036), (74, 74), 652),
        ((1920, 1080), (23, 41), (1708, 966), (122, 69), 968),
        ((4000, 3000), (27, 36), (1512, 1134), (108, 81), 1001),
        ((100, 2000), (58, 3), (126, 2436), (9, 174), 234),
    ],
)
def test_released_sizes(size, cells, pixels, patches, tokens):
    grid = image_grid(*size, RELEASED)
    assert (grid.cell_rows, grid.cell_columns) == cells
    assert (grid.width, grid.height) == pixels
    assert (grid.columns, grid.rows) == patches
    assert grid.num_tokens == tokens


def test_extreme_shapes_take_one_row_or_column_and_the_whole_budget():
    flat, narrow = image_grid(10**7, 1, RELEASED), image_grid(1, 10**7, RELEASED)
    assert (flat.cell_rows, flat.cell_columns, flat.num_tokens) == (1, 1021, 1024)
    assert (narrow.cell_rows, narrow.cell_columns, narrow.num_tokens) == (511, 1, 1024)


@given(SIDES, SIDES, CONFIGS)
def test_every_image_fits_the_budget(width, height, config):
    grid = image_grid(width, height, config)
    assert 4 <= grid.num_tokens <= config.max_image_tokens
    assert grid.width % config.patch_size == grid.height % config.patch_size == 0


@given(st.integers(600, 1000), st.integers(600, 1000))
def test_images_between_the_bounds_are_only_rounded_up(width, height):
    grid = image_grid(width, height, RELEASED)
    assert 0 <= grid.width - width < RELEASED.patch_size
    assert 0 <= grid.height - height < RELEASED.patch_size


@given(st.integers(50, 500), st.integers(50, 500))
def test_small_images_grow_to_the_fewest_pixels(width, height):
    grid = image_grid(width, height, RELEASED)
    scale = (RELEASED.min_pixels / (width * height)) ** 0.5
    assert -1 <= grid.width - max(1.0, scale) * width < RELEASED.patch_size
    assert -1 <= grid.height - max(1.0, scale) * height < RELEASED.patch_size


@given(st.integers(1500, 20_000), st.integers(1500, 20_000))
def test_shrinking_wastes_less_than_a_row_and_a_column_of_cells(width, height):
    grid = image_grid(width, height, RELEASED)
    aspect = height / width
    columns = ((1024 - 2) / aspect + 0.25) ** 0.5 - 0.5  # rows * (columns + 1) = 1022 exactly
    assert grid.cell_columns > columns - 1 - 1 / aspect
    assert grid.cell_rows > columns * aspect - 1 - aspect


@pytest.mark.parametrize("size", [(0, 5), (5, -1)])
def test_empty_images_are_refused(size):
    with pytest.raises(ValueError, match="both sides must be positive"):
        image_grid(*size, RELEASED)


def test_a_budget_of_no_cell_is_refused():
    with pytest.raises(ValueError, match="max_image_tokens is 3"):
        image_grid(10, 10, vision(max_image_tokens=3))


@given(st.integers(1, 400), st.integers(1, 400))
def test_contained_size_is_pillows(width, height):
    library = pytest.importorskip("PIL.Image")
    operations = pytest.importorskip("PIL.ImageOps")
    grid = image_grid(width, height, vision(max_image_tokens=30))
    frame = grid.width, grid.height
    wanted = operations.contain(library.new("L", (width, height)), frame).size
    assert contained_size(width, height, grid) == (wanted if min(wanted) > 0 else frame)


def test_a_side_of_nothing_takes_the_whole_grid():
    grid = image_grid(10**7, 1, RELEASED)
    assert contained_size(10**7, 1, grid) == (grid.width, grid.height) == (1021 * 42, 42)


@pytest.mark.oracle
@pytest.mark.parametrize("tokens", [1024, 50])
def test_equal_to_nemo(tokens):
    pytest.importorskip("nemo_automodel")
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41VisionConfig
    from nemo_automodel.components.models.deepseek_v41.processing import _plan_image_grid

    theirs = DeepseekV41VisionConfig(max_image_tokens=tokens)
    ours = vision(patch_size=14, max_image_tokens=tokens, min_pixels=295_936)
    draw = random.Random(0)
    for _ in range(20_000):
        width, height = (int(np.exp(draw.uniform(0, 10))) for _ in range(2))
        plan = _plan_image_grid(width, height, theirs)
        grid = image_grid(width, height, ours)
        assert (grid.width, grid.height) == (plan.width, plan.height), (width, height)
        assert (grid.cell_rows, grid.cell_columns) == (plan.llm_height, plan.llm_width)
