"""The rows of a prompt divided over ranks, so that each has an equal share of the causal work.

A sequence of q rows is cut into 2 R pieces of ceil(q / 2 R) rows; rank r takes pieces r and
2 R - 1 - r, an early one that sees little and a late one that sees much. Every rank keeps the whole
cache. Worked example, R = 2, q = 5: pieces of 2 rows; rank 0 has rows 0, 1 (and a piece behind the
end), rank 1 has rows 2, 3 and 4. Source: the released DeepInfer 0.1.0 (context parallelism).

S sequences, Q rows of a step, R ranks, P = ceil(Q / 2 R).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's rows of a step: two pieces of P rows, one after the other."""

    index: jax.Array  # int32 [S, 2 P] number of each row in the step
    own: jax.Array  # bool [S, 2 P] rows that this rank and no other computes
    places: jax.Array  # int32 [S, Q] where each row of the step is, in all shares one after another


def share(count: jax.Array, width: int, ranks: int, rank: jax.Array | int) -> Share:
    """The share of a rank.

    Args:
      count: int32 [S] rows of each sequence that are tokens, at most `width`.
      width: Q.
      ranks, rank: R and which one; the rank may be traced.
    """
    size = -(-width // (2 * ranks))
    piece = jnp.maximum(-(-count // (2 * ranks)), 1)[:, None]  # rows of a piece [S, 1]
    inside = jnp.tile(jnp.arange(size, dtype=jnp.int32), 2)
    number = jnp.repeat(jnp.array([rank, 2 * ranks - 1 - rank], jnp.int32), size)
    index = number * piece + inside
    row = jnp.arange(width, dtype=jnp.int32)
    at = jnp.minimum(row // piece, 2 * ranks - 1)
    late = at >= ranks
    owner = jnp.where(late, 2 * ranks - 1 - at, at)
    places = (2 * owner + late) * size + jnp.minimum(row - at * piece, size - 1)
    return Share(index, (inside < piece) & (index < count[:, None]), places)


def divide(x: jax.Array, mine: Share) -> jax.Array:
    """The rank's rows [S, 2 P, ...] of x [S, Q, ...]; rows behind the end are copies of the last."""
    at = jnp.minimum(mine.index, x.shape[1] - 1)
    return jax.vmap(lambda rows, index: rows[index])(x, at)


def join(x: jax.Array, mine: Share, axes: tuple[str, ...]) -> jax.Array:
    """All rows [S, Q, ...] of the ranks' shares [S, 2 P, ...], on every rank; under `shard_map`."""
    every = jnp.moveaxis(jax.lax.all_gather(x, axes), 0, 1)  # [S, R, 2 P, ...]
    flat = every.reshape(x.shape[0], -1, *x.shape[2:])
    return jax.vmap(lambda rows, index: rows[index])(flat, mine.places)
