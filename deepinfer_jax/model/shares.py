"""A step's rows, whole and as this rank's share of them: the same but under context parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.model.rows import Rows, take
from deepinfer_jax.parallel.context import Share, divide, join, share


@dataclasses.dataclass(frozen=True)
class Shares:
    """Rows that a rank computes, and how they become those of the step. S sequences, Q rows."""

    whole: Rows
    own: Rows
    axes: tuple[str, ...] = ()  # mesh axes of the ranks; none: `own` is `whole`
    share: Share | None = None

    @classmethod
    def of(cls, rows: Rows, axes: tuple[str, ...]) -> Shares:
        """Rows divided over the ranks of mesh axes, under `jax.shard_map`; alone without axes."""
        if not axes:
            return cls(rows, rows)
        ranks, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
        mine = share(rows.count, rows.tokens.shape[1], ranks, rank)
        own = dataclasses.replace(
            rows,
            tokens=divide(rows.tokens, mine),
            engram=tuple(divide(x, mine) for x in rows.engram),
            is_image=divide(rows.is_image, mine),
            embeddings=None if rows.embeddings is None else divide(rows.embeddings, mine),
            index=mine.index,
            own=mine.own,
        )
        return cls(rows, own, axes, mine)

    def divide(self, x: jax.Array) -> jax.Array:
        """This rank's rows of x [S, Q, ...]."""
        return x if self.share is None else divide(x, self.share)

    def join(self, x: jax.Array) -> jax.Array:
        """All rows [S, Q, ...] of this rank's x."""
        return x if self.share is None else join(x, self.share, self.axes)

    def over_window(
        self, function: Callable[[Any, jax.Array], jax.Array], rows: Any, window: jax.Array
    ) -> jax.Array:
        """function(rows, window), for each run of consecutive rows with its part of the window.

        Args:
          rows: a tree of [S, own rows, ...].
          window: [S, W + Q, C], the W rows before the step and the step's own.
          function: makes [S, b, ...] of b rows and the W rows before them with those b.
        """
        if self.share is None:
            return function(rows, window)
        width, size = self.whole.tokens.shape[1], self.share.index.shape[1] // 2
        history = window.shape[1] - width
        room = 2 * size * jax.lax.axis_size(self.axes) - width
        padded = jnp.pad(window, ((0, 0), (0, room), (0, 0)))
        made = []
        for piece in (slice(0, size), slice(size, 2 * size)):
            begin = self.share.index[:, piece.start]
            part = jax.tree.map(lambda x, piece=piece: x[:, piece], rows)
            made.append(function(part, take(padded, begin, history + size)))
        return jnp.concatenate(made, axis=1)
