"""Constants of the Engram hash, from the configuration alone: primes, multipliers, row offsets.

Sources: the released DeepSeek-V4.1-Flash settings and weights, whose table lengths the primes must
reproduce.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from deepinfer_jax.config import EngramConfig

PRIME_LIMIT = 2**25
"""Primes stay below this, so that remainders can be taken seven bits at a time in 32 bits."""

_SEED_STRIDE = 10_007


@dataclasses.dataclass(frozen=True)
class LayerHash:
    """The constants of one Engram layer. Hashable, so a jitted function may close over them."""

    multipliers: tuple[int, ...]  # [max_ngram], odd; entry i belongs to the token i places back
    primes: tuple[tuple[int, ...], ...]  # [max_ngram - 1][num_heads], orders ascending from 2
    pad: int | jax.Array  # compressed id where the look-back is blocked; an array is not hashable

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First table row of each (order, head), in the shape of `primes`."""
        starts = itertools.accumulate(itertools.chain((0,), *self.primes))
        return tuple(tuple(itertools.islice(starts, len(heads))) for heads in self.primes)


def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes at or above `start`, by a sieve of the interval they lie in."""
    width = 32 * count + 64
    while True:
        found = _sieve(max(start, 2), width)
        if len(found) >= count:
            return tuple(int(p) for p in found[:count])
        width *= 2


def _sieve(start: int, width: int) -> np.ndarray:
    is_prime = np.ones(width, dtype=bool)
    for divisor in range(2, math.isqrt(start + width) + 1):
        first = max(divisor * divisor, -(-start // divisor) * divisor)
        is_prime[first - start :: divisor] = False
    return start + np.flatnonzero(is_prime)


def multipliers(layer: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd factors of one layer, small enough that id * factor stays below 2**63."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_STRIDE * layer).integers(0, bound, max_ngram)
    return tuple(2 * int(draw) + 1 for draw in draws)


def layer_hashes(config: EngramConfig, pad: int) -> tuple[LayerHash, ...]:
    """The hash of every Engram layer, in the order of `config.layer_ids`.

    The released search takes, for each layer, order and head in turn, the next prime at or above
    `config.vocab_size` that nobody has taken: together, the first primes from there in order.

    Args:
      config: sizes; `num_embeddings` must hold the primes of each layer.
      pad: compressed id of `config.pad_token_id`.

    Raises:
      ValueError: a table is too short for its primes, or a prime is too large for the hash.
    """
    orders, heads = config.max_ngram - 1, config.num_heads
    shape = (len(config.layer_ids), orders, heads)
    primes = np.reshape(primes_from(config.vocab_size, math.prod(shape)), shape).tolist()
    for layer, rows, mine in zip(config.layer_ids, config.num_embeddings, primes, strict=True):
        _check_layer(layer, rows, mine)
    factors = (
        multipliers(layer, config.max_ngram, config.compressed_vocab_size)
        for layer in config.layer_ids
    )
    return tuple(
        LayerHash(m, tuple(map(tuple, p)), pad) for m, p in zip(factors, primes, strict=True)
    )


def _check_layer(layer: int, rows: int, primes: Sequence[Sequence[int]]) -> None:
    needed, largest = sum(map(sum, primes)), primes[-1][-1]
    if needed > rows:
        raise ValueError(
            f"engram layer {layer} has {rows} table rows and its primes need {needed}; "
            "raise its num_embeddings or lower vocab_size"
        )
    if largest >= PRIME_LIMIT:
        raise ValueError(
            f"engram layer {layer} hashes by the prime {largest}; remainders are exact below "
            f"{PRIME_LIMIT}, so lower vocab_size"
        )
