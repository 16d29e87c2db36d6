"""Prefill placement: quota pull by tiers, and the routing policies it is compared with.

A policy is `f(view, request, parameters) -> engine`, or `M` when it places the request nowhere.
Ties go to the lowest engine. Sources: the chapter, section 11.5, for tiers and pull; the baselines
name theirs. Policies are branch-free and need no random state: see `policy.view`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_jax.policy.view import (
    PARTS,
    Array,
    PolicyParameters,
    PrefillView,
    RequestView,
    in_parts,
    masked_argmin,
    namespace,
    nth,
)

PrefillPolicy = Callable[[PrefillView, RequestView, PolicyParameters], Array]

TIER_EDGES = (16_384, 65_536, 262_144)
"""Total context in tokens at which the next tier begins (the chapter, section 11.5)."""


def tier(total_context: Array, edges: tuple[int, ...] = TIER_EDGES) -> Array:
    """Tier of a prompt by its total context: the number of edges at or below it.

    Args:
      total_context: tokens, any shape.
      edges: ascending; an edge belongs to the tier above it.
    """
    xp = namespace(total_context)
    return xp.sum(xp.asarray(total_context)[..., None] >= np.asarray(edges, dtype=int), axis=-1)


def tier_shares(demand: Array, engines: Array) -> Array:
    """Engines per tier in proportion to quota demand, each tier with demand having at least one.

    A tier whose exact share is below one engine gets one; the others split what is left by largest
    remainder (ties: lowest tier). With fewer engines than tiers in demand, the largest demands get
    one each. Without any demand the tiers count as equal. [100, 1, 0, 0] over 4 gives [3, 1, 0, 0].

    Args:
      demand: [T] non-negative integers with demand * engines below 2**63.
      engines: how many there are to share out, 0 or more.

    Returns:
      [T] integers that sum to `engines`.
    """
    xp = namespace(demand, engines)
    demand = xp.where(xp.any(demand > 0), demand, xp.ones_like(demand))
    wanted = demand > 0
    small = xp.zeros_like(wanted)
    # Taking a small tier out lowers the others' shares, at most T times.
    for _ in range(demand.shape[0]):
        left = engines - xp.sum(small)
        total = xp.sum(xp.where(small, 0, demand))
        small = small | (wanted & (demand * left < total))
    left = engines - xp.sum(small)
    total = xp.maximum(xp.sum(xp.where(small, 0, demand)), 1)
    whole = xp.where(small, 0, demand * left // total)
    remainder = xp.where(wanted & ~small, demand * left % total, -1)
    extra = _descending_rank(remainder) < left - xp.sum(whole)
    largest = _descending_rank(demand) < engines
    return xp.where(xp.sum(wanted) > engines, largest, small + whole + extra).astype(int)


def _descending_rank(values: Array) -> Array:
    """Position of each value in descending order, ties by index, without sorting. [T] -> [T]."""
    xp = namespace(values)
    index = xp.arange(values.shape[0])
    ahead = values[None, :] > values[:, None]
    tied = (values[None, :] == values[:, None]) & (index[None, :] < index[:, None])
    return xp.sum(ahead | tied, axis=1)


def least_quota_rank(rank_quota: Array) -> Array:
    """Rank of a DP group with the least quota load. [ranks] ticks -> index."""
    return namespace(rank_quota).argmin(rank_quota)


def pull(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """The engine with most remaining quota takes the tier's head, if its cost there fits the cap.

    A cost that does not fit is taken by an engine with nothing debited only; otherwise `M`: the
    head waits, and so does everything behind it (the chapter, section 11.5).
    """
    xp = namespace(view.quota_used)
    engine = masked_argmin(view.eligible, view.quota_used - view.quota_cap)
    takes = (view.quota_used + view.hit_cost <= view.quota_cap) | (view.quota_used == 0)
    size = view.eligible.shape[0]
    return xp.where(takes[xp.minimum(engine, size - 1)], engine, size)


def least_quota(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """The engine with the least predicted work."""
    return masked_argmin(view.eligible, view.quota_used)


def round_robin(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Eligible engines in turn: the (decisions mod their number)-th."""
    return nth(view.eligible, request.decisions)


def random(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """An eligible engine by the request's draw: the (draw mod their number)-th."""
    return nth(view.eligible, request.draw)


def least_loaded(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Fewest requests, those decoding on the engine included; then fewest tokens."""
    return masked_argmin(view.eligible, view.requests + view.decode_requests, view.tokens)


def least_tokens(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Fewest uncached tokens queued or running."""
    return masked_argmin(view.eligible, view.tokens)


def local_affinity(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """The longest hit, then the least quota: without any hit, the least quota alone."""
    return masked_argmin(view.eligible, -view.hit_tokens, view.quota_used)


def affinity_with_recompute(
    view: PrefillView, request: RequestView, parameters: PolicyParameters
) -> Array:
    """Earliest predicted finish: behind the holder's queue, or recomputing on an idler engine."""
    return masked_argmin(view.eligible, view.quota_used + view.hit_cost)


def cache_aware(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Least loaded while loads differ much, else the best match, else the smallest cache.

    Loads (requests, decoding ones included) differ much when max - min > `balance_abs` and max >
    `balance_rel` * min. A match counts above `cache_threshold` of the input. Ties: the load; it
    stands in for the cache's size where `cached_tokens` is unknown. Source: the SGLang router.
    """
    xp = namespace(view.requests)
    load = view.requests + view.decode_requests
    most = xp.max(xp.where(view.eligible, load, 0))
    least = xp.min(xp.where(view.eligible, load, xp.max(load)))
    rel = in_parts(parameters.balance_rel)
    uneven = (most - least > parameters.balance_abs) & (PARTS * most > rel * least)
    hit = xp.max(xp.where(view.eligible, view.hit_tokens, 0))
    matched = PARTS * hit > in_parts(parameters.cache_threshold) * request.input_tokens
    cached = xp.broadcast_to(xp.asarray(view.cached_tokens), load.shape)
    key = xp.where(uneven, load, xp.where(matched, -view.hit_tokens, cached))
    return masked_argmin(view.eligible, key, load)


def dynamo_cost(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Least `overlap_weight` * prefill blocks + decode blocks; ties go to the lowest engine.

    Prefill blocks are (input - hit + tokens queued or running) / `block_tokens`, not rounded; all
    terms are multiplied by `block_tokens`. Source: NVIDIA Dynamo's KV router (temperature 0).
    """
    prefill_tokens = request.input_tokens - view.hit_tokens + view.tokens
    decode_tokens = parameters.block_tokens * view.decode_blocks
    weight = in_parts(parameters.overlap_weight)
    return masked_argmin(view.eligible, weight * prefill_tokens + PARTS * decode_tokens)


def mooncake(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Least predicted TTFT, where an engine far short of the best prefix first fetches it.

    With best / own hit < `balancing_threshold`: queue + prefill with the own hit; else the queue +
    (best - own) * `transfer_ticks_per_token` + prefill with the best hit. `quota_used` is the
    queue, and the least `hit_cost` the prefill with the best hit. Source: Mooncake, Algorithm 1.
    """
    xp = namespace(view.hit_tokens)
    best = xp.max(xp.where(view.eligible, view.hit_tokens, 0))
    best_cost = xp.min(xp.where(view.eligible, view.hit_cost, xp.max(view.hit_cost)))
    near = PARTS * best < in_parts(parameters.balancing_threshold) * view.hit_tokens
    transfer = (best - view.hit_tokens) * parameters.transfer_ticks_per_token
    prefill = xp.where(near, view.hit_cost, transfer + best_cost)
    return masked_argmin(view.eligible, view.quota_used + prefill)


def dualpath(view: PrefillView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Fewest tokens among engines with a short reading queue, else among the rest.

    Short: reading tokens <= `reading_alpha`. Overloaded: tokens > `token_beta`; with every engine
    overloaded the request waits (`M`). Source: DualPath, arXiv 2602.21548, section 4.
    """
    allowed = view.eligible & (view.tokens <= parameters.token_beta)
    long = (view.reading_tokens > parameters.reading_alpha).astype(int)
    return masked_argmin(allowed, long, view.tokens)
