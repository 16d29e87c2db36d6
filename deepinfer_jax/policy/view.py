"""What a policy may see: one view for the real entrypoint (numpy) and for the simulator (jnp).

Letters: `M` engines, `J` ranks of all engines taken together (rank = engine * ranks_per_engine +
local rank). A policy is a branch-free function of these arrays that returns an index, or the
array's size when nothing qualifies. It works in its arguments' own array namespace, so one
definition serves both callers. Comparisons are made in integers (under jit: with 64-bit integers
enabled), because a compiler may fuse a float multiply and add and so decide another way than numpy.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

PARTS = 10**6
"""Denominator of the fractional parameters inside policies: 1.05 counts as 1,050,000 / PARTS."""


def namespace(*arrays: Array) -> ModuleType:
    """numpy when every argument is a numpy array or a Python scalar, jax.numpy otherwise."""
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def masked_argmin(mask: Array, *keys: Array) -> Array:
    """Index of the lexicographically smallest `keys` where `mask` holds; the size if none does.

    Args:
      mask: bool [M].
      *keys: numeric [M] each, the most significant first. Ties go to the lowest index.
    """
    xp = namespace(mask, *keys)
    for key in keys:
        worst = np.inf if np.issubdtype(key.dtype, np.floating) else np.iinfo(key.dtype).max
        best = xp.min(xp.where(mask, key, xp.asarray(worst, dtype=key.dtype)))
        mask = mask & (key == best)
    return xp.where(xp.any(mask), xp.argmax(mask), mask.shape[0])


def nth(mask: Array, n: Array) -> Array:
    """Index of the `n`-th entry (from 0, modulo their number) where `mask` holds; the size if none.

    Args:
      mask: bool [M].
      n: integer scalar, 0 or more.
    """
    xp = namespace(mask, n)
    position = xp.cumsum(mask) - 1
    return masked_argmin(mask & (position == n % xp.maximum(xp.sum(mask), 1)))


def in_parts(value: Array) -> Array:
    """A fractional parameter as an integer number of 1 / PARTS, rounded."""
    xp = namespace(value)
    return xp.round(value * PARTS).astype(int)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestView:
    """The request being placed. Scalars; times in ticks, lengths in tokens."""

    index: Array  # dense request number, also the number of earlier arrivals
    decisions: Array  # placements made so far by this policy (the round-robin counter)
    draw: Array  # uniform in [0, 2**31), a function of (seed, request) alone
    input_tokens: Array
    context_tokens: Array  # tokens it will hold when placed (prefill: input, decode: input + 1)
    cost: Array  # predicted ticks of its prefill on an engine that must not recompute
    shared_hit_tokens: Array  # compute hit from the shared store, 0 without one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillView:
    """The prefill side of the cluster, one entry per engine. Arrays [M]."""

    eligible: Array  # bool: takes prompts, is up, belongs to the request's tier
    quota_used: Array  # predicted ticks pulled and not yet credited
    quota_cap: Array  # cap in ticks
    requests: Array  # prompts queued or running
    tokens: Array  # uncached tokens queued or running
    reading_tokens: Array  # tokens whose fetch has not ended
    decode_requests: Array  # requests decoding on the same engine (co-located modes)
    decode_blocks: Array  # KV blocks those hold
    hit_tokens: Array  # compute hit of *this* request on each engine (own cache, or shared store)
    hit_cost: Array  # predicted ticks of its prefill on each engine with that hit
    cached_tokens: Array = 0  # size of each engine's own prefix cache; a scalar when not known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeView:
    """The decode side of the cluster, one entry per rank. Arrays [J]."""

    eligible: Array  # bool: takes completions and is up
    room: Array  # bool: a slot and the reserved blocks are free
    requests: Array  # requests assigned: in transfer, waiting, running
    tokens: Array  # KV tokens those hold or will hold on arrival
    group: Array  # engine of the rank, below J


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyParameters:
    """Numbers of the placement policies; every one may be swept. Scalars."""

    short_below: Array = 4096  # two_load: shorter requests go to low concurrency
    dualpath_slack: Array = 1.05  # Z = slack * mean tokens, separate (DualPath section 4)
    reading_alpha: Array = 0  # DualPath alpha, tokens storage reads in 3 s
    token_beta: Array = 0  # DualPath beta, tokens one GPU processes in 5 s
    cache_threshold: Array = 0.3  # cache_aware, separate (SGLang router)
    balance_abs: Array = 64
    balance_rel: Array = 1.5
    overlap_weight: Array = 1.0  # dynamo_cost, separate (Dynamo KV router)
    block_tokens: Array = 128
    balancing_threshold: Array = 2.0  # mooncake, separate (FAST'25 Algorithm 1)
    transfer_ticks_per_token: Array = 0
