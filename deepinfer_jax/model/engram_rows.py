"""Which table rows an n-gram reads: a 63-bit hash without 64-bit integers.

The n-gram of order k mixes the compressed ids of a token and of the k - 1 before it: each is
multiplied by an odd factor, the products are joined by exclusive or, and the remainder by one prime
per head names a row. jax has no 64-bit integers unless the whole process asks for them, so a
product is kept as two uint32 halves and the remainder is taken seven bits at a time.
Source: the released DeepSeek-V4.1-Flash model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.engram_hash import LayerHash

Array = Any

BLOCKED = -1
"""Stands for the compressed id of a position that has none: before the sequence, or in an image."""

_HALF = 0xFFFF
_DIGIT = 7  # bits per step of the remainder: what a prime below PRIME_LIMIT leaves free of 32
_DIGITS = 9  # 63 bits


def row_ids(layer: LayerHash, tokens: Array, lookback: Array) -> Array:
    """Table rows that each token reads in one Engram layer.

    Works in the arguments' array namespace: numpy on the host, jax.numpy on the device and under
    jit. An n-gram that reaches a BLOCKED position takes `layer.pad` there and at every position
    behind it.

    Args:
      layer: constants of the layer.
      tokens: compressed ids, int32 [..., Q]; BLOCKED at image tokens.
      lookback: compressed ids of the max_ngram - 1 positions before, oldest first, int32
        [..., max_ngram - 1]; BLOCKED at image tokens and before the start of the sequence.

    Returns:
      int32 [..., Q, rows_per_token]: orders ascending, heads within them; BLOCKED rows where the
      token itself is BLOCKED.
    """
    xp = jnp if any(isinstance(a, jax.Array) for a in (tokens, lookback)) else np
    grams = _grams(xp, tokens, lookback, layer.pad)
    terms = (_product(gram, factor) for gram, factor in zip(grams, layer.multipliers, strict=True))
    rolls = itertools.accumulate(terms, lambda a, b: (a[0] ^ b[0], a[1] ^ b[1]))
    rows = [
        _remainder(xp, high[..., None], low[..., None], primes) + xp.asarray(offsets, xp.uint32)
        for (high, low), primes, offsets in zip(
            itertools.islice(rolls, 1, None), layer.primes, layer.offsets, strict=True
        )
    ]
    found = xp.concatenate(rows, axis=-1).astype(xp.int32)
    return xp.where(tokens[..., None] < 0, BLOCKED, found)


def _grams(xp: ModuleType, tokens: Array, lookback: Array, pad: Array) -> Iterator[Array]:
    """Ids 0, 1, ... places back as uint32 [..., Q], `pad` from the first blocked one on."""
    reach, length = lookback.shape[-1], tokens.shape[-1]
    history = xp.concatenate([lookback, tokens], axis=-1)
    blocked = xp.zeros(tokens.shape, bool)
    for back in range(reach + 1):
        ids = history[..., reach - back : reach - back + length]
        blocked = blocked | (ids < 0)
        yield xp.where(blocked, pad, ids).astype(xp.uint32)


def _product(ids: Array, factor: int) -> tuple[Array, Array]:
    """ids * factor modulo 2**64 as (high, low) uint32 halves, from 16-bit by 16-bit products."""
    a0, a1 = ids & _HALF, ids >> 16
    b0, b1, b_high = factor & _HALF, factor >> 16 & _HALF, ids.dtype.type(factor >> 32)
    low, cross, crossed, high = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (low >> 16) + (cross & _HALF) + (crossed & _HALF)
    carried = (cross >> 16) + (crossed >> 16) + (middle >> 16)
    return high + carried + ids * b_high, (low & _HALF) | (middle << 16)


def _remainder(xp: ModuleType, high: Array, low: Array, primes: Sequence[int]) -> Array:
    """(high * 2**32 + low) modulo each prime, for values below 2**63: high digits first."""
    divisor = xp.asarray(primes, xp.uint32)
    rest = xp.zeros(xp.broadcast_shapes(low.shape, divisor.shape), xp.uint32)
    for digit in reversed(range(_DIGITS)):
        rest = ((rest << _DIGIT) | _bits(high, low, _DIGIT * digit)) % divisor
    return rest


def _bits(high: Array, low: Array, at: int) -> Array:
    """The seven bits of (high, low) that start at bit `at`."""
    if at >= 32:
        return high >> (at - 32) & (2**_DIGIT - 1)
    spill = high << (32 - at) if at else 0
    return (low >> at | spill) & (2**_DIGIT - 1)
