"""Rows to the ranks that hold their experts, and back: a fixed-capacity all-to-all in rounds.

For use under `jax.shard_map`. Each (token, expert) pair is a row of its own. Rows are ordered by
expert slot; a round carries up to C of them from each rank to each other one, and rounds go on until
all ranks have sent everything. So nothing is dropped, whatever the routing, and a balanced one takes
a single round. A token's rows are summed where they came from, in the order of its choice, so
that where its experts lie changes no bit of the sum. Where XLA has a ragged all-to-all, `ragged`
does the same without padding between ranks, if asked.

R ranks, N pairs of a rank, D hidden size, L slots of a rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.parallel.ragged import HEADROOM, Compute, ragged_exchange


def fair_capacity(pairs: int, ranks: int) -> int:
    """Rows per round from one rank to another, for an even routing with some headroom."""
    return min(pairs, max(1, math.ceil(HEADROOM * pairs / ranks)))


def exchange(
    rows: jax.Array,
    slots: jax.Array,
    weight: jax.Array,
    compute: Compute,
    *,
    axes: tuple[str, ...],
    local_slots: int,
    capacity: int = 0,
    ragged: bool = False,
) -> jax.Array:
    """float32 [N, D]: `compute` of each row on the rank of its slot; zero for slots of nobody.

    Args:
      rows: [N, D].
      slots: int32 [N], slot s lies on rank s // L; R * L for nobody.
      weight: float32 [N].
      compute: what a rank does with the rows it got.
      axes: mesh axes of the ranks.
      local_slots: L.
      capacity: C, or 0 for `fair_capacity`.
      ragged: by `ragged.ragged_exchange`, but on CPUs, which have no such collective.
    """
    common: dict[str, Any] = {"compute": compute, "axes": axes, "local_slots": local_slots}
    fixed: Callable[..., jax.Array] = functools.partial(_fixed, capacity=capacity, **common)
    if not ragged:
        return fixed(rows, slots, weight)
    exact = functools.partial(ragged_exchange, **common)
    return jax.lax.platform_dependent(rows, slots, weight, cpu=fixed, default=exact)


def _fixed(
    rows: jax.Array,
    slots: jax.Array,
    weight: jax.Array,
    *,
    compute: Compute,
    axes: tuple[str, ...],
    local_slots: int,
    capacity: int,
) -> jax.Array:
    ranks, pairs = jax.lax.axis_size(axes), rows.shape[0]
    limit = capacity or fair_capacity(pairs, ranks)
    rank = jnp.minimum(slots // local_slots, ranks)
    counts = jnp.zeros(ranks, jnp.int32).at[rank].add(1, mode="drop")
    order = jnp.argsort(slots, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(pairs, dtype=order.dtype))
    starts = jnp.cumsum(counts) - counts
    number = place - starts[jnp.minimum(rank, ranks - 1)]  # among those to the same rank
    rounds = jax.lax.pmax(-(-counts.max() // limit), axes)

    def swap(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)

    def carry(i: jax.Array, made: jax.Array) -> jax.Array:
        mine = (rank < ranks) & (number // limit == i)
        at = jnp.where(mine, rank * limit + number % limit, ranks * limit)

        def send(x: jax.Array, nothing: int) -> jax.Array:
            buffer = jnp.full((ranks * limit, *x.shape[1:]), nothing, x.dtype)
            return swap(buffer.at[at].set(x, mode="drop"))

        got = compute(send(rows, 0), send(slots % local_slots, local_slots), send(weight, 0))
        back = swap(got)[jnp.minimum(at, ranks * limit - 1)]
        return jnp.where(mine[:, None], back, made)

    return jax.lax.fori_loop(0, rounds, carry, jnp.zeros(rows.shape, jnp.float32))


def look_up(table: jax.Array, rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[..., W]: rows of a table that is divided over the ranks, this rank's share [rows / R, W].

    Each rank reads what the others ask of its share. `rows` int32 [...] are clipped to the table.
    """
    ranks, share = jax.lax.axis_size(axes), table.shape[0]
    wanted = jnp.clip(rows.reshape(-1), 0, ranks * share - 1)
    asked = jax.lax.all_gather(wanted, axes) - jax.lax.axis_index(axes) * share  # [R, n]
    mine = (asked >= 0) & (asked < share)
    found = jnp.where(mine[..., None], table[jnp.clip(asked, 0, share - 1)], 0)
    answers = jax.lax.all_to_all(found, axes, 0, 0, tiled=True)  # one of R is not zero
    return answers.sum(0, dtype=table.dtype).reshape(*rows.shape, table.shape[1])
