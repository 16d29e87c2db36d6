"""The placement policies of sections 5 and 7, from their published rules, in exact integers.

A policy returns an index into the view's lists, or None when it places the request nowhere.
Fractional parameters count in millionths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

MILLION = 10**6
DEFAULTS = {
    "short_below": 4096,
    "dualpath_slack": 1.05,
    "reading_alpha": 0,
    "token_beta": 0,
    "cache_threshold": 0.3,
    "balance_abs": 64,
    "balance_rel": 1.5,
    "overlap_weight": 1.0,
    "block_tokens": 128,
    "balancing_threshold": 2.0,
    "transfer_ticks_per_token": 0,
}


@dataclasses.dataclass
class Asked:
    """The request being placed."""

    decisions: int
    draw: int
    tokens: int
    cost: int = 0


@dataclasses.dataclass
class PrefillSide:
    """One entry per engine."""

    eligible: list[bool]
    quota_used: list[int]
    requests: list[int]
    tokens: list[int]
    reading_tokens: list[int]
    decode_requests: list[int]
    decode_blocks: list[int]
    hit_tokens: list[int]
    hit_cost: list[int]
    cached_tokens: list[int]


@dataclasses.dataclass
class DecodeSide:
    """One entry per rank of all engines."""

    eligible: list[bool]
    room: list[bool]
    requests: list[int]
    tokens: list[int]
    group: list[int]


def millionths(value: float) -> int:
    """A fractional parameter as an integer."""
    return round(value * MILLION)


def least(candidates: Iterable[int], key: Callable[[int], Any]) -> int | None:
    """The candidate with the smallest key; the lowest on ties."""
    return min(candidates, key=lambda i: (key(i), i), default=None)


def in_turn(candidates: list[int], n: int) -> int | None:
    """The n-th, counted round."""
    return candidates[n % len(candidates)] if candidates else None


def prefill(name: str, v: PrefillSide, asked: Asked, parameters: dict[str, Any]) -> int | None:
    """An engine for a prompt by every policy but `pull`."""
    p = DEFAULTS | parameters
    engines = [m for m, yes in enumerate(v.eligible) if yes]
    load = [a + b for a, b in zip(v.requests, v.decode_requests, strict=True)]
    if name == "least_quota":
        return least(engines, lambda m: v.quota_used[m])
    if name == "round_robin":
        return in_turn(engines, asked.decisions)
    if name == "random":
        return in_turn(engines, asked.draw)
    if name == "least_loaded":
        return least(engines, lambda m: (load[m], v.tokens[m]))
    if name == "least_tokens":
        return least(engines, lambda m: v.tokens[m])
    if name == "local_affinity":
        return least(engines, lambda m: (-v.hit_tokens[m], v.quota_used[m]))
    if name == "affinity_with_recompute":
        return least(engines, lambda m: v.quota_used[m] + v.hit_cost[m])
    if name == "cache_aware":
        return cache_aware(v, engines, load, asked.tokens, p)
    if name == "dynamo_cost":
        weight = millionths(p["overlap_weight"])
        return least(
            engines,
            lambda m: (
                weight * (asked.tokens - v.hit_tokens[m] + v.tokens[m])
                + MILLION * p["block_tokens"] * v.decode_blocks[m]
            ),
        )
    if name == "mooncake":
        return mooncake(v, engines, p)
    if name == "dualpath":
        able = [m for m in engines if v.tokens[m] <= p["token_beta"]]
        short = [m for m in able if v.reading_tokens[m] <= p["reading_alpha"]]
        return least(short or able, lambda m: v.tokens[m])
    raise ValueError(f"prefill_policy = {name!r} is unknown here; use a registered name")


def cache_aware(
    v: PrefillSide, engines: list[int], load: list[int], tokens: int, p: dict[str, Any]
) -> int | None:
    """Balance when loads differ much, else the best match, else the smallest cache."""
    low, high = min(load[m] for m in engines), max(load[m] for m in engines)
    if high - low > p["balance_abs"] and MILLION * high > millionths(p["balance_rel"]) * low:
        return least(engines, lambda m: load[m])
    best = max(v.hit_tokens[m] for m in engines)
    if MILLION * best > millionths(p["cache_threshold"]) * tokens:
        return least(engines, lambda m: (-v.hit_tokens[m], load[m]))
    return least(engines, lambda m: (v.cached_tokens[m], load[m]))


def mooncake(v: PrefillSide, engines: list[int], p: dict[str, Any]) -> int | None:
    """Least predicted time to the first token, with the own hit or a fetched better one."""
    best = max(v.hit_tokens[m] for m in engines)
    best_cost = min(v.hit_cost[m] for m in engines)
    threshold = millionths(p["balancing_threshold"])

    def first_token(m: int) -> int:
        own = v.hit_tokens[m]
        if MILLION * best < threshold * own:
            return v.quota_used[m] + v.hit_cost[m]
        transfer = (best - own) * p["transfer_ticks_per_token"]
        return v.quota_used[m] + transfer + best_cost

    return least(engines, first_token)


def decode(name: str, v: DecodeSide, asked: Asked, parameters: dict[str, Any]) -> int | None:
    """A rank for a request whose prefill ended; without room anywhere, among all eligible."""
    p = DEFAULTS | parameters
    eligible = [j for j, yes in enumerate(v.eligible) if yes]
    ranks = [j for j in eligible if v.room[j]] or eligible
    if name == "round_robin":
        return in_turn(ranks, asked.decisions)
    if name == "random":
        return in_turn(ranks, asked.draw)
    if name == "least_requests":
        return least(ranks, lambda j: v.requests[j])
    if name == "least_tokens":
        return least(ranks, lambda j: v.tokens[j])
    if name == "two_load":
        short = asked.tokens < p["short_below"]
        return least(ranks, lambda j: v.requests[j] if short else v.tokens[j])
    if name == "dualpath_z":
        return dualpath_z(v, eligible, ranks, asked.tokens, p)
    raise ValueError(f"decode_policy = {name!r} is unknown here; use a registered name")


def dualpath_z(
    v: DecodeSide, eligible: list[int], ranks: list[int], tokens: int, p: dict[str, Any]
) -> int | None:
    """Least loaded group, then fewest requests among its ranks under Z, else fewest tokens."""
    total = {
        g: sum(v.tokens[j] for j in eligible if v.group[j] == g)
        for g in {v.group[j] for j in ranks}
    }
    group = least(total, lambda g: total[g])
    if group is None:
        return None
    size = sum(v.group[j] == group for j in eligible)
    z_times_size = millionths(p["dualpath_slack"]) * (tokens + total[group])
    members = [j for j in ranks if v.group[j] == group]
    under = [j for j in members if MILLION * size * (v.tokens[j] + tokens) <= z_times_size]
    if under:
        return least(under, lambda j: v.requests[j])
    return least(members, lambda j: v.tokens[j])


def tier_shares(demand: list[int], engines: int) -> list[int]:
    """Engines per tier: one for each tier with demand, the rest by largest remainder."""
    tiers = sorted((t for t, d in enumerate(demand) if d > 0), key=lambda t: (-demand[t], t))
    shares = [0] * len(demand)
    if engines < len(tiers):
        for t in tiers[:engines]:
            shares[t] = 1
        return shares
    left, split = engines, list(tiers)
    while True:
        total = sum(demand[t] for t in split)
        below = [t for t in split if demand[t] * left < total]
        if not below:
            break
        for t in below:
            shares[t] = 1
            left -= 1
            split.remove(t)
    for t in split:
        shares[t] = demand[t] * left // total
    extra = left - sum(shares[t] for t in split)
    for t in sorted(split, key=lambda t: (-(demand[t] * left % total), t))[:extra]:
        shares[t] += 1
    return shares
