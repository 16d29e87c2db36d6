"""Rows of images among the rows of a prompt step, packed from what was encoded before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.engine.plan import PlanRow
from deepinfer_jax.engine.request import Request
from deepinfer_jax.rules import require

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PictureRows:
    """Of S chunks of Q rows. A step without images has none of these, and is a smaller program."""

    is_image: Array  # bool [S, Q]
    embeddings: Array  # float32 [S, Q, D], read where is_image

    @classmethod
    def blank(cls, shape: tuple[int, int], hidden: int) -> PictureRows:
        """Chunks [S, Q] of text only."""
        return cls(np.zeros(shape, bool), np.zeros((*shape, hidden), np.float32))

    @classmethod
    def of(
        cls,
        rows: Sequence[PlanRow],
        requests: Sequence[Request],
        shape: tuple[int, int],
        hidden: int,
    ) -> PictureRows | None:
        """Images that overlap the chunks of a step of `shape` [S, Q]; None if none does.

        Raises:
          ValueError: a request with images came without what stands there.
        """
        if not any(row.images for row in rows):
            return None
        made = cls.blank(shape, hidden)
        for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
            require(
                len(request.pictures) == len(request.images),
                f"request {request.request_id} has {len(request.images)} images and vectors of "
                f"{len(request.pictures)}; encode them first (`pictures.PictureEncoder`)",
            )
            for image, vectors in zip(request.images, request.pictures, strict=True):
                start, end = max(image.start, row.start), min(image.end, row.k)
                if start < end:
                    here = slice(start - row.start, end - row.start)
                    made.is_image[i, here] = True
                    made.embeddings[i, here] = vectors[start - image.start : end - image.start]
        return made

    @classmethod
    def of_ranks(
        cls,
        parts: Sequence[Sequence[PlanRow]],
        requests: Sequence[Sequence[Request]],
        shape: tuple[int, int],
        hidden: int,
    ) -> list[PictureRows | None]:
        """One for each rank's chunks: if any has images, all have rows for them."""
        found = [
            cls.of(rows, asking, shape, hidden)
            for rows, asking in zip(parts, requests, strict=True)
        ]
        if any(found):
            return [own or cls.blank(shape, hidden) for own in found]
        return found
