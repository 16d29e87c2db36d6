"""Images as the encoder's input: centred in their grid, cut into patches, packed into a batch.

Bytes stay bytes here; the encoder scales them. Source: the released DeepInfer 0.1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_jax.model.images import ImageGrid

PAD_VALUE = 127
"""Grey that fills what the scaled image leaves of its grid."""


def patches(pixels: np.ndarray, grid: ImageGrid) -> np.ndarray:
    """An image cut into patches, centred in its grid and framed in grey.

    Args:
      pixels: uint8 [h, w, 3], already resampled to `contained_size`.
      grid: where it goes.

    Returns:
      uint8 [rows * columns, 3, patch_size, patch_size], patches row by row.

    Raises:
      ValueError: the image is no RGB image of bytes, or does not fit the grid.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"an image is {pixels.dtype} {list(pixels.shape)}; give RGB bytes, uint8 [h, w, 3]"
        )
    height, width = pixels.shape[:2]
    if height > grid.height or width > grid.width:
        raise ValueError(
            f"an image of {width} x {height} pixels exceeds its grid of {grid.width} x "
            f"{grid.height}; resample it to contained_size first"
        )
    canvas = np.full((grid.height, grid.width, 3), PAD_VALUE, np.uint8)
    top, left = round((grid.height - height) / 2), round((grid.width - width) / 2)  # half to even
    canvas[top : top + height, left : left + width] = pixels
    side = grid.patch_size
    tiles = canvas.reshape(grid.rows, side, grid.columns, side, 3)
    return tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)


def pack(images: Sequence[np.ndarray], grids: Sequence[ImageGrid]) -> tuple[np.ndarray, np.ndarray]:
    """Several images as one padded batch.

    Args:
      images: patches of each, uint8 [P_b, 3, p, p].
      grids: their grids.

    Returns:
      Patches, uint8 [B, P, 3, p, p] with P the largest number, zeros behind shorter ones; rows and
      columns of patches, int32 [B, 2].
    """
    longest = max(len(image) for image in images)
    batch = np.zeros((len(images), longest, *images[0].shape[1:]), np.uint8)
    for slot, image in zip(batch, images, strict=True):
        slot[: len(image)] = image
    return batch, np.array([(grid.rows, grid.columns) for grid in grids], np.int32)
