"""Patches against slices of the framed image, and against Pillow's own framing."""

import numpy as np
import pytest

from deepinfer_jax.model.image_patches import PAD_VALUE, pack, patches
from deepinfer_jax.model.images import ImageGrid, contained_size


def picture(height, width, seed=0):
    """Random RGB bytes."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_patches_are_slices_row_by_row_channels_first():
    grid = ImageGrid(rows=2, columns=3, patch_size=4, downsample_ratio=3)
    image = picture(8, 12)
    cut = patches(image, grid)
    assert cut.shape == (6, 3, 4, 4)
    np.testing.assert_array_equal(cut[4, 2], image[4:8, 4:8, 2])


@pytest.mark.parametrize(("slack", "before"), [(1, 0), (2, 1), (3, 2), (5, 2), (7, 4)])
def test_half_of_an_odd_slack_rounds_to_even(slack, before):
    grid = ImageGrid(rows=1, columns=1, patch_size=10, downsample_ratio=3)
    row = patches(np.zeros((10, 10 - slack, 3), np.uint8), grid)[0, 0, 0]
    after = slack - before
    assert row.tolist() == [PAD_VALUE] * before + [0] * (10 - slack) + [PAD_VALUE] * after


@pytest.mark.parametrize("size", [(30, 17), (17, 30), (5, 60), (16, 24), (200, 11)])
def test_framing_is_pillows(size):
    library = pytest.importorskip("PIL.Image")
    operations = pytest.importorskip("PIL.ImageOps")
    grid = ImageGrid(rows=4, columns=6, patch_size=4, downsample_ratio=3)
    image = library.fromarray(picture(*size))
    frame = grid.width, grid.height
    whole = np.asarray(operations.pad(image, frame, color=(PAD_VALUE,) * 3))
    resampled = image.resize(contained_size(*image.size, grid))
    wanted = [whole[y : y + 4, x : x + 4] for y in range(0, 16, 4) for x in range(0, 24, 4)]
    np.testing.assert_array_equal(
        patches(np.asarray(resampled), grid), np.moveaxis(np.stack(wanted), -1, 1)
    )


def test_what_is_no_image_of_the_grid_is_refused():
    grid = ImageGrid(rows=1, columns=2, patch_size=4, downsample_ratio=3)
    with pytest.raises(ValueError, match="resample it to contained_size"):
        patches(picture(4, 9), grid)
    with pytest.raises(ValueError, match=r"float32 \[4, 8, 3\]; give RGB bytes"):
        patches(picture(4, 8).astype(np.float32), grid)
    with pytest.raises(ValueError, match="give RGB bytes"):
        patches(np.zeros((4, 8, 4), np.uint8), grid)


def test_a_batch_is_padded_behind_the_shorter_image():
    grids = [ImageGrid(1, 2, 4, 3), ImageGrid(2, 2, 4, 3)]
    images = [patches(picture(4, 8, 1), grids[0]), patches(picture(8, 8, 2), grids[1])]
    batch, sides = pack(images, grids)
    assert sides.tolist() == [[1, 2], [2, 2]] and batch.shape == (2, 4, 3, 4, 4)
    np.testing.assert_array_equal(batch[0, :2], images[0])
    np.testing.assert_array_equal(batch[1], images[1])
    assert not batch[0, 2:].any()
