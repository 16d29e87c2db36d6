"""Images in the prompt: the span of tokens each becomes, and the vectors that stand there.

A span is: start, then for each row of cells its image tokens and a newline, then end. Every token
carries its type and, for an image token, which cell of which image it shows, so a step may begin
anywhere. Sources: the released DeepInfer 0.1.0.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.images import ImageGrid

Array = Any


class TokenType(enum.IntEnum):
    """What stands at a position of the prompt. Codes of the release; 0 counts as text, too."""

    TEXT = 1
    IMAGE = 2
    START = 3
    END = 4
    NEWLINE = 5


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """A prompt of T tokens whose placeholders have become spans."""

    tokens: np.ndarray  # int32 [T]; inside spans, ids behind the vocabulary
    types: np.ndarray  # int32 [T], TokenType
    image: np.ndarray  # int32 [T], which image of the prompt; 0 outside image tokens
    cell: np.ndarray  # int32 [T], which cell of it, row by row; 0 outside image tokens


def is_image(types: Array) -> Array:
    """Whether a position belongs to an image, brackets and newlines included."""
    return types >= TokenType.IMAGE


def expand(tokens: Sequence[int], grids: Sequence[ImageGrid], config: ModelConfig) -> ImagePrompt:
    """A prompt with each image placeholder replaced by the span of its image.

    A span's first id is vocab_size + 2, the others are vocab_size + 1. Placeholders beyond the
    number of images stay ordinary tokens.

    Args:
      tokens: ids of the prompt with one placeholder per image.
      grids: of the images, in order.
      config: the model; it must have a vision part.

    Raises:
      ValueError: the model takes no images, or there are more images than placeholders.
    """
    if config.vision is None:
        raise ValueError("the model has no vision part; give text only")
    placeholder = config.vision.image_token_id
    places = [i for i, token in enumerate(tokens) if token == placeholder]
    if len(places) < len(grids):
        raise ValueError(
            f"the prompt has {len(places)} image placeholders for {len(grids)} images; "
            f"give one token {placeholder} per image"
        )
    images = dict(zip(places, enumerate(grids), strict=False))
    positions = list(_positions(tokens, images, config.vocab_size))
    return ImagePrompt(*np.array(positions, np.int32).reshape(-1, 4).T)


def _positions(
    tokens: Sequence[int], images: dict[int, tuple[int, ImageGrid]], vocab_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """(token, type, image, cell) of every position."""
    for place, token in enumerate(tokens):
        if place not in images:
            yield token, TokenType.TEXT, 0, 0
            continue
        image, grid = images[place]
        yield vocab_size + 2, TokenType.START, 0, 0
        for row in range(grid.cell_rows):
            for column in range(grid.cell_columns):
                cell = row * grid.cell_columns + column
                yield vocab_size + 1, TokenType.IMAGE, image, cell
            yield vocab_size + 1, TokenType.NEWLINE, 0, 0
        yield vocab_size + 1, TokenType.END, 0, 0


def place(
    params: dict[str, Any],
    embeddings: jax.Array,
    features: jax.Array,
    types: jax.Array,
    image: jax.Array,
    cell: jax.Array,
) -> jax.Array:
    """Embedding rows with image features and learned vectors in their places.

    Args:
      params: `image_start`, `image_end`, `image_newline`, each [D].
      embeddings: rows of the tokens, [S, Q, D]; what stands inside spans is replaced.
      features: encoded cells, [B, M, D].
      types: TokenType, int32 [S, Q].
      image: row of `features`, int32 [S, Q]; read at image tokens.
      cell: column of `features`, int32 [S, Q]; read at image tokens.

    Returns:
      [S, Q, D] in the dtype of `embeddings`.
    """
    vectors = {
        TokenType.IMAGE: features.at[image, cell].get(mode="clip"),
        TokenType.START: params["image_start"],
        TokenType.END: params["image_end"],
        TokenType.NEWLINE: params["image_newline"],
    }
    for kind, vector in vectors.items():
        here = (types == kind)[..., None]
        embeddings = jnp.where(here, vector.astype(embeddings.dtype), embeddings)
    return embeddings
