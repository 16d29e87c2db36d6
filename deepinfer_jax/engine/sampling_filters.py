"""Top-p, top-k and min-p as prefixes of one order, found by bisection instead of a sort.

The order is descending value, equals by ascending id; +0 and -0 are equal. A token is kept iff

* top-p: the mass of all tokens ahead of it is <= p (so the kept mass exceeds p, unless p is 1);
* top-k: fewer than k tokens are ahead of it;
* min-p: its probability is at least min_p times the largest one.

Each keeps a prefix of the order, so several keep the shortest of theirs, in any order of
application. All masses are of the distribution before any filter, as in the released engine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def prefix(values: jax.Array, weights: jax.Array, budget: jax.Array) -> jax.Array:
    """Which tokens have at most `budget` of weight ahead of them: bool [..., V].

    Args:
      values: float32 [..., V], finite; their order is the order.
      weights: float32 [..., V], not negative; equal for equal values.
      budget: float32 [...], not negative; infinity keeps everything.

    32 halvings of the threshold on the values' bits; each is one masked sum. The sum of a smaller
    set is never larger, in floating point too, so the search is sound.
    """
    keys = _ordered(values)

    def ahead(threshold: jax.Array) -> jax.Array:
        return jnp.where(keys > threshold[..., None], weights, 0).sum(-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = ahead(middle) <= budget
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros(budget.shape, jnp.uint32)
    low, _ = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, 0xFFFFFFFF)))
    equal = keys == low[..., None]
    before = jnp.cumsum(equal, axis=-1, dtype=jnp.int32) - equal  # equals of a lower id
    mass = ahead(low)[..., None] + before * weights
    return (keys > low[..., None]) | (equal & (mass <= budget[..., None]))


def keep(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array) -> jax.Array:
    """Tokens that survive all three filters: bool [S, Q, V].

    Args:
      scaled: float32 [S, Q, V] logits over temperature.
      top_p, min_p: float32 [S].
      top_k: int32 [S], at least 1; V or more is off.
    """
    vocabulary = scaled.shape[-1]
    shape = scaled.shape[:2]
    largest = scaled.max(-1, keepdims=True)
    likely = scaled - largest >= jnp.log(min_p)[:, None, None]

    def cut() -> jax.Array:
        mass = jnp.broadcast_to(jnp.where(top_p < 1, top_p, jnp.inf)[:, None], shape)
        count = jnp.where(top_k < vocabulary, top_k - 1, vocabulary).astype(jnp.float32)
        nucleus = prefix(scaled, jax.nn.softmax(scaled, axis=-1), mass)
        few = jnp.broadcast_to(count[:, None], shape)
        return likely & nucleus & prefix(scaled, jnp.ones_like(scaled), few)

    cutting = jnp.any(top_p < 1) | jnp.any(top_k < vocabulary)
    return lax.cond(cutting, cut, lambda: likely)


def _ordered(values: jax.Array) -> jax.Array:
    """uint32 that compare as the floats do, both zeros alike."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
