"""One softmax over keys that arrive in blocks; shared by the attention kernels.

R rows of queries, K keys of a block, C channels. Keys are values. S sequences, Q rows, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOOR = float(np.finfo(np.float32).min)  # a masked score; finite, so that no row is all NaN


class Attended(NamedTuple):
    """Attention, and what it takes to merge it with another part of the same softmax."""

    mixed: jax.Array  # [S, Q, H, C] float32, or in a kernel's dtype; zero where nothing was seen
    top: jax.Array  # float32 [S, Q, H] greatest score
    total: jax.Array  # float32 [S, Q, H] sum of exp(score - top)


def merge(one: Attended, other: Attended) -> jax.Array:
    """[S, Q, H, C] in the first part's dtype: one softmax over both parts' keys, summed in float32."""
    top = jnp.maximum(one.top, other.top)
    shares = [part.total * jnp.exp(part.top - top) for part in (one, other)]
    total = shares[0] + shares[1]
    shares = [(share / jnp.where(total > 0, total, 1))[..., None] for share in shares]
    mixed = one.mixed * shares[0] + other.mixed * shares[1]
    return mixed.astype(one.mixed.dtype)


class Softmax(NamedTuple):
    """What was attended so far, all float32."""

    top: jax.Array  # [R, 1] the greatest score
    total: jax.Array  # [R, 1] sum of exp(score - top)
    mixed: jax.Array  # [R, C] sum of exp(score - top) value


def fresh(rows: int, width: int) -> Softmax:
    """Nothing attended."""
    return Softmax(
        jnp.full((rows, 1), FLOOR), jnp.zeros((rows, 1)), jnp.zeros((rows, width), jnp.float32)
    )


def absorb(state: Softmax, query: jax.Array, keys: jax.Array, shown: jax.Array) -> Softmax:
    """The state with keys [K, C] where shown [R, K]; query [R, C]; hidden keys must be finite."""
    scores = jax.lax.dot_general(
        query, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    scores = jnp.where(shown, scores * query.shape[-1] ** -0.5, FLOOR)
    top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
    weight = jnp.where(shown, jnp.exp(scores - top), 0)
    keep = jnp.exp(state.top - top)
    mixed = jnp.dot(weight.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    total = state.total * keep + weight.sum(-1, keepdims=True)
    return Softmax(top, total, state.mixed * keep + mixed)


def add_sink(state: Softmax, sink: jax.Array) -> Softmax:
    """The state with one more score, float32 [R, 1], whose value is zero; -inf adds nothing."""
    top = jnp.maximum(state.top, sink)
    keep = jnp.exp(state.top - top)
    return Softmax(top, state.total * keep + jnp.exp(sink - top), state.mixed * keep)


def normed(state: Softmax) -> jax.Array:
    """float32 [R, C]; zero where nothing was attended."""
    return state.mixed / jnp.where(state.total > 0, state.total, 1)
