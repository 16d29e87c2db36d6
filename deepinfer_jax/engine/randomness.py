"""Random numbers that depend on a request's seed, a position and a use, and on nothing else.

Counter based: uniform = threefry(threefry(seed, position), use). No state, so a request draws the
same numbers whatever shares its batch, in whatever row it lies, overlapped or not, and again after
a preemption. (Sampled tokens may differ then: where blocks of drafts begin has moved, so drafts and
with them uses of the numbers differ; their law does not.) `position` is the absolute position the
drawn token will take.

A test behind a rejected draft is drawn again by a later step. That is harmless: nothing committed
depended on the first draw, because a draft's acceptance looks at no later position.

Drafts are different. Confidences of one block of drafts decide how many drafts of the next blocks
are verified, so a draft's number must not come back in a later block: the law of what is emitted
would change. Their numbers therefore belong to the block, whose first position only grows.
Worked example of the fault, both blocks using one number u for a position: drafts a iff u < 1/2,
verified iff the older draft was a, target q(a) = 1/4. Then a is emitted with chance
1/2 x 1/2 + 1/2 x 1/4 = 3/8.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

RESOLUTION = 24
"""Uniforms are multiples of 2**-24 in [0, 1): every value exact in float32, 1 never reached."""


class Use(enum.IntEnum):
    """What a number is for; no two uses at one position share a number."""

    FRESH = 0  # a token from the target distribution
    RESIDUAL = 1  # a token instead of a rejected draft
    ACCEPT = 2  # the test of a draft
    DRAFT = 3  # draft i of a block is use 3 + i at the block's first position


def seed_words(seeds: Sequence[int]) -> np.ndarray:
    """64-bit seeds as threefry keys: uint32 [S, 2], high word first."""
    return np.array([(s >> 32, s & 0xFFFFFFFF) for s in seeds], np.uint32).reshape(-1, 2)


def uniforms(words: jax.Array, positions: jax.Array, use: int | jax.Array) -> jax.Array:
    """float32 numbers in [0, 1), one per position.

    Args:
      words: uint32 [S, 2], `seed_words`.
      positions: int32 [S, ...].
      use: a `Use`, or an array of them that broadcasts to `positions`.
    """
    uses = jnp.broadcast_to(jnp.asarray(use, jnp.uint32), positions.shape)
    flat = positions.reshape(positions.shape[0], -1).astype(jnp.uint32)
    across = jax.vmap(_bits, in_axes=(None, 0, 0))
    bits = jax.vmap(across)(words, flat, uses.reshape(flat.shape))
    high = (bits >> (32 - RESOLUTION)).astype(jnp.float32)
    return (high * 2.0**-RESOLUTION).reshape(positions.shape)


def _bits(words: jax.Array, position: jax.Array, use: jax.Array) -> jax.Array:
    """First word of the twice-folded key."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, position), use)
    return jax.random.key_data(key)[0]
