"""Rows to the ranks that hold their experts, and back, as many as there are: a ragged all-to-all.

The same as `exchange.exchange`, without padding between ranks. Of the rows for one rank, in the order
of their senders, a round carries M; rounds go on until the busiest rank has had all of its. XLA has
the collective on TPUs and GPUs, not on CPUs.

R ranks, N pairs of a rank, D hidden size, L slots of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [M, D], local slot int32 [M], L for nobody, weight float32 [M]) -> float32 [M, D]."""

HEADROOM = 1.5  # a round, of either exchange, has room for this many times the fair share


def fair_room(pairs: int, ranks: int) -> int:
    """Rows that a rank receives in a round, for an even routing with some headroom."""
    return min(ranks * pairs, max(1, math.ceil(HEADROOM * pairs)))


def ragged_exchange(
    rows: jax.Array,
    slots: jax.Array,
    weight: jax.Array,
    compute: Compute,
    *,
    axes: tuple[str, ...],
    local_slots: int,
    room: int = 0,
    collective: Callable[..., Any] = jax.lax.ragged_all_to_all,
) -> jax.Array:
    """float32 [N, D], as `exchange.exchange`.

    Args:
      room: M, or 0 for `fair_room`.
      collective: has the meaning of `jax.lax.ragged_all_to_all`.
    """
    ranks, me, pairs = jax.lax.axis_size(axes), jax.lax.axis_index(axes), rows.shape[0]
    limit = room or fair_room(pairs, ranks)
    rank = jnp.minimum(slots // local_slots, ranks)
    order = jnp.argsort(slots, stable=True)
    mine = jnp.zeros(ranks, jnp.int32).at[rank].add(1, mode="drop")
    counts = jax.lax.all_gather(mine, axes)  # [sender, receiver], as all that follow
    starts = jnp.cumsum(counts, axis=1) - counts  # in the sender's order
    before = jnp.cumsum(counts, axis=0) - counts  # in the receiver's
    rounds = -(-counts.sum(0).max() // limit)
    given = rows[order], (slots % local_slots)[order], weight[order]

    def carry(i: jax.Array, made: jax.Array) -> jax.Array:
        low = i * limit
        begin = jnp.clip(before, low, low + limit)
        size = jnp.clip(before + counts, low, low + limit) - begin
        there = begin - low
        here = jnp.where(size > 0, starts + begin - before, 0)

        def send(x: jax.Array, nothing: int) -> jax.Array:
            buffer = jnp.full((limit, *x.shape[1:]), nothing, x.dtype)
            return collective(x, buffer, here[me], size[me], there[me], size[:, me], axis_name=axes)

        got = compute(send(given[0], 0), send(given[1], local_slots), send(given[2], 0))
        return collective(
            got, made, there[:, me], size[:, me], here[:, me], size[me], axis_name=axes
        )

    made = jax.lax.fori_loop(0, rounds, carry, jnp.zeros(rows.shape, jnp.float32))
    return jnp.zeros_like(made).at[order].set(made)
