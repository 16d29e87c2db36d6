"""The size an image is given before the encoder sees it.

An image is scaled so that its patches, merged into cells, fit the token budget: a cell is one token,
a row of cells ends with a newline token, and two more tokens bracket the image.
Sources: the released DeepInfer 0.1.0 and DeepSeek-V4.1-Flash settings. Resampling is left to the
caller; `contained_size` says to which size (the release uses Pillow's default filter).
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax.config import VisionConfig

_BRACKETS = 2  # start and end token of an image


@dataclasses.dataclass(frozen=True)
class ImageGrid:
    """An image as the encoder sees it. Rows and columns; pixels where said."""

    rows: int  # of patches
    columns: int
    patch_size: int  # pixels
    downsample_ratio: int  # patches per side of a cell

    @property
    def width(self) -> int:
        """Pixels."""
        return self.columns * self.patch_size

    @property
    def height(self) -> int:
        """Pixels."""
        return self.rows * self.patch_size

    @property
    def cell_rows(self) -> int:
        """Rows of cells; the last may be cut short by the image's edge."""
        return -(-self.rows // self.downsample_ratio)

    @property
    def cell_columns(self) -> int:
        """Columns of cells."""
        return -(-self.columns // self.downsample_ratio)

    @property
    def num_tokens(self) -> int:
        """Tokens in the prompt: cells, a newline after each row, start and end."""
        return self.cell_rows * (self.cell_columns + 1) + _BRACKETS


def image_grid(width: int, height: int, config: VisionConfig) -> ImageGrid:
    """The grid of an image, from its own size in pixels.

    A small image grows to `min_pixels`; sides round up to whole patches; an image over the token
    budget shrinks, keeping its shape, to as many whole cells as fit.

    Raises:
      ValueError: a side is not positive, or the budget holds no cell.
    """
    if width <= 0 or height <= 0:
        raise ValueError(f"an image is {width} x {height} pixels; both sides must be positive")
    if config.max_image_tokens < _BRACKETS + 2:
        raise ValueError(
            f"max_image_tokens is {config.max_image_tokens}; one cell takes {_BRACKETS + 2} tokens "
            "with its newline, start and end, so raise it"
        )
    width, height = _grown(width, height, config.min_pixels)
    patch, ratio = config.patch_size, config.downsample_ratio
    grid = ImageGrid(-(-height // patch), -(-width // patch), patch, ratio)
    return grid if grid.num_tokens <= config.max_image_tokens else _shrunk(width, height, config)


def _grown(width: int, height: int, min_pixels: int) -> tuple[int, int]:
    if width * height >= min_pixels:
        return width, height
    scale = (min_pixels / (width * height)) ** 0.5
    return int(width * scale), int(height * scale)


def _shrunk(width: int, height: int, config: VisionConfig) -> ImageGrid:
    """The grid that fills the budget: c columns of cells and c * height / width rows of c + 1.

    An image too flat or too narrow for one whole cell takes a single row or column.
    """
    budget = config.max_image_tokens - _BRACKETS
    patch, ratio = config.patch_size, config.downsample_ratio
    aspect = height / width
    most_columns = math.sqrt(budget / aspect + 0.25) - 0.5
    most_rows = most_columns * aspect
    if most_columns < 1:
        return ImageGrid(budget // 2 * ratio, ratio, patch, ratio)
    if most_rows < 1:
        return ImageGrid(ratio, (budget - 1) * ratio, patch, ratio)
    cell = patch * ratio
    scale = min(math.floor(most_columns) * cell / width, math.floor(most_rows) * cell / height)
    rows, columns = (max(1, math.floor(side * scale / patch)) for side in (height, width))
    return ImageGrid(rows, columns, patch, ratio)


def contained_size(width: int, height: int, grid: ImageGrid) -> tuple[int, int]:
    """Width and height, in pixels, to resample an image to: its own shape inside the grid.

    Where that would leave a side of nothing, the whole grid.
    """
    shape, frame = width / height, grid.width / grid.height
    if shape > frame:
        size = grid.width, round(height / width * grid.width)
    elif shape < frame:
        size = round(shape * grid.height), grid.height
    else:
        size = grid.width, grid.height
    return size if min(size) > 0 else (grid.width, grid.height)
