"""The encoder against NeMo's features (frozen, and live), its padding, dtypes and size."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.cost.parameters import parameter_counts
from deepinfer_jax.model import vision
from deepinfer_jax.model.vision_parameters import vision_shapes
from tests.model import vision_nemo
from tests.model.vision_nemo import GRIDS, VISION

CELLS = max(grid.cell_rows * grid.cell_columns for grid in GRIDS)


@functools.cache
def encoder(cells):
    """The jitted encoder for a number of cells."""
    return jax.jit(functools.partial(vision.encode, config=VISION, cells=cells))


def encode(params, patches, grids, cells=CELLS):
    """Features of a batch, float32 numpy."""
    found = encoder(cells)(params, patches=jnp.asarray(patches), grids=jnp.asarray(grids))
    return np.asarray(found.astype(jnp.float32))


def check(found, wanted, **tolerance):
    """Every cell of every image; behind them, something finite."""
    assert len(found) == len(wanted) == 3 and np.isfinite(found).all()
    for image, features in zip(found, wanted, strict=True):
        np.testing.assert_allclose(image[: len(features)], features, **tolerance)


def frozen():
    """NeMo's features of the three images."""
    return json.loads(vision_nemo.FIXTURE.read_text())["features"]


def test_frozen_features_of_nemo():
    """A 4 x 7 grid (zeros at both edges of its cells), one whole cell, and a single row."""
    assert [len(image) for image in frozen()] == [6, 1, 2]
    check(encode(vision_nemo.weights(), *vision_nemo.images()), frozen(), atol=2e-5)


def test_padding_bytes_do_not_reach_the_features():
    patches, grids = vision_nemo.images()
    for image, grid in zip(patches, GRIDS, strict=True):
        image[grid.rows * grid.columns :] = 255
    check(encode(vision_nemo.weights(), patches, grids), frozen(), atol=2e-5)


def test_queries_in_several_slices(monkeypatch):
    """Large images are scored a slice of queries at a time; 28 patches in slices of 8."""
    monkeypatch.setattr(vision, "_QUERIES", 8)
    patches, grids = vision_nemo.images()
    slices = jax.jit(vision.encode, static_argnums=(1, 4))
    check(slices(vision_nemo.weights(), VISION, patches, grids, CELLS + 1), frozen(), atol=2e-5)


def test_an_empty_slot_of_the_batch_is_finite():
    patches, grids = vision_nemo.images()
    grids[1] = 0
    found = encode(vision_nemo.weights(), patches, grids)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0], frozen()[0], atol=2e-5)


def test_bfloat16():
    params = jax.tree.map(jnp.bfloat16, vision_nemo.weights())
    patches, grids = vision_nemo.images()
    raw = encoder(CELLS)(params, patches=jnp.asarray(patches), grids=jnp.asarray(grids))
    assert raw.dtype == jnp.bfloat16
    check(np.asarray(raw.astype(jnp.float32)), frozen(), atol=0.1)


def test_shapes_count_the_released_parameters():
    """The independent count by formula, and the released names' shapes."""
    model = presets.v41_flash()
    tree = vision_shapes(model, jnp.bfloat16)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    assert total == parameter_counts(model)["vision"]
    assert tree["aligner"]["w1"]["weight"].shape == (5120, 9216)
    assert tree["patch_embed"]["weight"].shape == (1024, 588)


def test_text_models_have_no_vision_parameters():
    with pytest.raises(ValueError, match="no vision part"):
        vision_shapes(presets.tiny(), jnp.float32)


@pytest.mark.oracle
def test_equal_to_nemo():
    pytest.importorskip("nemo_automodel")
    wanted = vision_nemo.features()
    check(encode(vision_nemo.weights(), *vision_nemo.images()), wanted, atol=2e-5)
    for kept, features in zip(frozen(), wanted, strict=True):
        np.testing.assert_allclose(kept, features, atol=2e-5)
