"""Prompts with images: what a user gives becomes token ids, spans, and the vectors that stand there.

An image is resampled to its grid, encoded once, before its request is queued, and its vectors wait
on the host: chunks, recomputation after a preemption and other ranks take the rows they need.
Sources: the released DeepInfer 0.1.0 and DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image as Pillow

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import image_patches, image_tokens, vision
from deepinfer_jax.model.images import ImageGrid, contained_size, image_grid
from deepinfer_jax.policy.prefix import Image, digest
from deepinfer_jax.rules import require

Text = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class MultimodalPrompt:
    """Texts (or token ids) and images, in the order in which they are read."""

    parts: Sequence[Text | np.ndarray]  # an image: uint8 [height, width, 3], RGB


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prompt as a `Request` takes it."""

    tokens: list[int]
    images: tuple[Image, ...] = ()
    pictures: tuple[np.ndarray, ...] = ()  # float32 [tokens of the image, D], one per image


class PictureEncoder:
    """The encoder of a model's images; its programs are compiled per size, in powers of two."""

    def __init__(self, params: dict[str, Any], model: ModelConfig) -> None:
        """An encoder over a model's parameter tree.

        Raises:
          ValueError: the model has no vision part.
        """
        require(model.vision is not None, "the model has no vision part; give text only")
        self.params, self.model = params["vision"], model
        self._encode = jax.jit(functools.partial(_encode, model), static_argnames="cells")

    def prepare(self, prompt: MultimodalPrompt, ids: Callable[[Text], list[int]]) -> Prepared:
        """A prompt, its images encoded; waits for them.

        Args:
          ids: the token ids of a text.

        Raises:
          ValueError: an image that is no uint8 [height, width, 3], or that has no pixels.
        """
        tokens: list[int] = []
        images, pictures = [], []
        for part in prompt.parts:
            if not isinstance(part, np.ndarray):
                tokens += ids(part)
                continue
            span, vectors = self.encode(part)
            key = digest(repr(part.shape).encode() + part.tobytes())
            images.append(Image(len(tokens), len(tokens) + len(span), key))
            pictures.append(vectors)
            tokens += span
        return Prepared(tokens, tuple(images), tuple(pictures))

    def encode(self, pixels: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Ids of an image's T tokens, and the vectors that stand there, float32 [T, D]."""
        assert self.model.vision is not None
        require(
            pixels.dtype == np.uint8
            and pixels.ndim == 3
            and pixels.shape[2] == 3
            and pixels.size > 0,
            f"an image is {pixels.dtype} {list(pixels.shape)}; give RGB bytes, uint8 [height, width, "
            "3], at least one pixel",
        )
        height, width = pixels.shape[:2]
        grid = image_grid(width, height, self.model.vision)
        placeholder = self.model.vision.image_token_id
        span = image_tokens.expand([placeholder], [grid], self.model)
        length, cells = len(span.tokens), grid.cell_rows * grid.cell_columns
        patches = image_patches.patches(_resampled(pixels, grid), grid)
        vectors = self._encode(
            self.params,
            _padded(patches, 0),
            np.array([[grid.rows, grid.columns]], np.int32),
            _padded(span.types, image_tokens.TokenType.TEXT),
            _padded(span.cell, 0),
            cells=_power(cells),
        )
        return span.tokens.tolist(), np.asarray(vectors)[:length]


def _encode(
    model: ModelConfig,
    params: dict[str, Any],
    patches: jax.Array,
    grid: jax.Array,
    types: jax.Array,
    cell: jax.Array,
    cells: int,
) -> jax.Array:
    """Vectors float32 [T, D] of one image's tokens, from its patches uint8 [P, 3, p, p]."""
    assert model.vision is not None
    features = vision.encode(params, model.vision, patches[None], grid, cells)
    blank = jnp.zeros((1, len(types), model.hidden_size), features.dtype)
    placed = image_tokens.place(
        params, blank, features, types[None], jnp.zeros_like(cell)[None], cell[None]
    )
    return placed[0].astype(jnp.float32)


def _resampled(pixels: np.ndarray, grid: ImageGrid) -> np.ndarray:
    """By Pillow's default filter, as the release does."""
    size = contained_size(pixels.shape[1], pixels.shape[0], grid)
    return np.asarray(Pillow.fromarray(pixels).resize(size))


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _padded(x: np.ndarray, fill: int) -> np.ndarray:
    """x [T, ...], its first axis filled up to a power of two."""
    rest = ((0, _power(len(x)) - len(x)), *((0, 0),) * (x.ndim - 1))
    return np.pad(x, rest, constant_values=fill)
