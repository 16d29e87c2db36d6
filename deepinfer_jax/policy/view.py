"""What a policy may see: the same view from the real entrypoint (numpy) and from the simulator (jnp).

Letters: `M` engines, `J` ranks of all engines taken together (rank = engine * ranks_per_engine + local rank).
A policy is a branch-free function of these arrays that returns an index, or the array's size when
nothing qualifies. It works in its arguments' own array namespace, so one definition serves both callers.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


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
        worst = xp.asarray(np.inf if np.issubdtype(key.dtype, np.floating) else np.iinfo(key.dtype).max)
        best = xp.min(xp.where(mask, key, worst.astype(key.dtype)))
        mask = mask & (key == best)
    return xp.where(xp.any(mask), xp.argmax(mask), mask.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestView:
    """The request being placed. Scalars; times in ticks, lengths in tokens."""

    index: Array  # dense request number, also the number of earlier arrivals
    decisions: Array  # placements made so far by this policy (the round-robin counter)
    draw: Array  # uniform in [0, 2**31), a function of (seed, request) alone
    input_tokens: Array
    context_tokens: Array  # tokens the request will hold when placed (input for prefill, input + 1 for decode)
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
    hit_tokens: Array  # compute hit of *this* request on each engine (own cache, or the shared store)
    hit_cost: Array  # predicted ticks of its prefill on each engine with that hit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeView:
    """The decode side of the cluster, one entry per rank. Arrays [J]."""

    eligible: Array  # bool: takes completions and is up
    room: Array  # bool: a slot and the reserved blocks are free
    requests: Array  # requests assigned: in transfer, waiting, running
    tokens: Array  # KV tokens those hold or will hold on arrival
    group: Array  # engine of the rank


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
