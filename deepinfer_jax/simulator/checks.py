"""Refuses clusters that contradict themselves, with the value, the rule and the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator

from deepinfer_jax.policy.retention import PRECEDENCES
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator.cluster import (
    ANCHORS,
    CACHE_SCOPES,
    FOREVER,
    FRAGMENTS,
    LINKS,
    NEEDED,
    ClusterConfig,
    Incident,
    Mode,
    Pool,
)
from deepinfer_jax.simulator.options import unread

LONGEST_ACCESS = 2**38
"""Ticks: an access of nine times the mean, times 2**20, must fit into int64."""

LONGEST_STEP_SECONDS = 8
"""A decode step's subs must leave room to add a run of them in int64."""


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ValueError for the first broken rule of `cluster`."""
    rules = (
        _ranges,
        _engines,
        _choices,
        _caches,
        _retention,
        _tiers,
        _steps,
        _incidents,
        _scaling,
        _ignored,
    )
    for problem in itertools.chain.from_iterable(rule(cluster) for rule in rules):
        raise ValueError(problem)


NOT_NEGATIVE = (
    "match_ticks write_back_ticks swa_ttl_ticks cache_blocks max_input_tokens fetch_ticks "
    "fetch_femtoseconds_per_byte swa_femtoseconds_per_byte block_bytes swa_bytes step_quota "
    "handoff_ticks handoff_femtoseconds_per_byte live_bytes nextn restart_ticks repair_ticks "
    "retry_limit storage_nodes storage_repair_ticks start_ticks grace_ticks retention_low_blocks "
    "storage_read_ticks storage_femtoseconds_per_byte"
)
AT_LEAST_ONE = (
    "ranks slots block_tokens batch_tokens batch_requests chunk_multiple prompt_interval "
    "prompt_any_interval tier_round_ticks scale_round_ticks retention_sweep_ticks stripe_blocks"
)


def _ranges(c: ClusterConfig) -> Iterator[str]:
    for least, names in ((0, NOT_NEGATIVE), (1, AT_LEAST_ONE)):
        for name in names.split():
            if getattr(c, name) < least:
                yield f"{name}={getattr(c, name)}: must be at least {least}"
    if any(quota < 0 for quota in c.tier_quota):
        yield f"tier_quota={c.tier_quota}: caps are ticks and must not be negative"
    share, whole = c.prompt_usage_limit
    if not 0 <= share <= whole or whole < 1:
        yield f"prompt_usage_limit={c.prompt_usage_limit}: must be a fraction (numerator, denominator) up to 1"
    known = [field.name for field in dataclasses.fields(PolicyParameters)]
    for name in c.policy:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            yield f"policy parameter {name!r} is unknown: did you mean {near!r}?"


def check_warm(cluster: ClusterConfig, requests: int) -> None:
    """Raises ValueError when a warm request is not one of the workload's."""
    outside = [i for i in cluster.warm_requests if not 0 <= i < requests]
    if outside:
        raise ValueError(
            f"warm_requests holds {outside[0]}, but the workload's requests are 0..{requests - 1}"
        )


def check_traffic(cluster: ClusterConfig, classes: int) -> None:
    """Raises ValueError when a workload of so many traffic classes has one without a TTL."""
    ttls = len(cluster.retention_ttl_ticks)
    if 0 < ttls < classes:
        raise ValueError(
            f"retention_ttl_ticks has {ttls} TTLs, but the workload has {classes} traffic classes; "
            "give one each"
        )


def _retention(c: ClusterConfig) -> Iterator[str]:
    low, high = c.retention_low_blocks, c.retention_high_blocks
    if min(c.retention_ttl_ticks, default=0) < 0:
        yield f"retention_ttl_ticks={c.retention_ttl_ticks}: must not be negative"
    if low > high:
        yield f"retention_low_blocks={low} exceeds retention_high_blocks={high}: sweeps free down to low"
    if high < FOREVER and high > c.cache_blocks:
        yield f"retention_high_blocks={high} is never reached: a cache holds {c.cache_blocks}"
    if c.retention and not c.retention_ttl_ticks and high == FOREVER:
        yield "retention_sweep_ticks is set, but nothing expires: give TTLs or watermarks, or unset it"


def _engines(c: ClusterConfig) -> Iterator[str]:
    strange = [m for m in c.modes if m not in list(Mode)]
    if strange:
        yield f"modes holds {strange[0]!r}: use {', '.join(mode.name for mode in Mode)}"
    takers = [m for m in c.modes if m != Mode.COMPLETION]
    if not takers:
        yield f"modes={c.modes}: no engine takes prompts; add a PROMPT, NORMAL or MIXED engine"
    if Mode.PROMPT in c.modes and Mode.COMPLETION not in c.modes:
        yield "modes has PROMPT engines but no COMPLETION engine to hand requests to; add one"
    if Mode.COMPLETION in c.modes and Mode.PROMPT not in c.modes:
        yield "modes has COMPLETION engines but no PROMPT engine to feed them; add one or use NORMAL"
    if c.kv_blocks is not None and c.kv_blocks < 1:
        yield f"kv_blocks={c.kv_blocks}: must be positive; use None for no limit"
    if c.nextn and len(c.acceptance) != c.nextn:
        yield f"acceptance has {len(c.acceptance)} positions for nextn={c.nextn}; give one probability each"
    if any(not 0 <= a <= 1 for a in c.acceptance):
        yield f"acceptance={c.acceptance}: conditional probabilities must lie in [0, 1]"


def _choices(c: ClusterConfig) -> Iterator[str]:
    for name, allowed in (
        ("cache_scope", CACHE_SCOPES),
        ("fetch_link", LINKS),
        ("handoff_link", LINKS),
        ("swa_anchors", ANCHORS),
        ("retention_precedence", PRECEDENCES),
    ):
        if getattr(c, name) not in allowed:
            yield f"{name}={getattr(c, name)!r} is unknown; choose one of {', '.join(allowed)}"


def _caches(c: ClusterConfig) -> Iterator[str]:
    if c.reserve < 1:
        yield f"reserve={c.reserve}: at least one prompt token must be computed; use 1 or more"
    if not 0 <= c.warm_engine < c.engines:
        yield f"warm_engine={c.warm_engine}: engines are 0..{c.engines - 1}"


def _tiers(c: ClusterConfig) -> Iterator[str]:
    serving = zip(c.modes, c.serving_at_first, strict=True)
    takers = sum(serves and m != Mode.COMPLETION for m, serves in serving)
    if list(c.tier_edges) != sorted(set(c.tier_edges)):
        yield f"tier_edges={c.tier_edges}: must ascend strictly"
    if len(c.tier_quota) != c.tiers:
        yield f"tier_quota has {len(c.tier_quota)} caps for {c.tiers} tiers; give one each"
    if c.tier_engines and (len(c.tier_engines) != c.tiers or sum(c.tier_engines) != takers):
        yield f"tier_engines={c.tier_engines}: must deal {takers} prompt-taking engines to {c.tiers} tiers"
    if c.tiers > takers:
        yield f"{c.tiers} tiers for {takers} prompt-taking engines: a tier could wait for ever; use fewer tier_edges"


def _steps(c: ClusterConfig) -> Iterator[str]:
    cost = c.cost
    longest = max(float(a) + float(b) * c.slots for a, b, _ in cost.decode_forms)
    longest += (
        float(cost.decode_exchange_base) + float(cost.decode_exchange_row) * c.slots * c.ranks
    )
    if longest > LONGEST_STEP_SECONDS * 1e15:
        yield (
            f"a decode step of {c.slots} rows lasts {longest / 1e15:.3g} s; "
            f"the clock holds {LONGEST_STEP_SECONDS} s: use smaller units"
        )
    if min(float(x) for form in cost.decode_forms for x in form) < 0:
        yield f"decode_forms={cost.decode_forms}: coefficients must not be negative"
    for field in dataclasses.fields(cost):
        if field.name != "decode_forms" and float(getattr(cost, field.name)) < 0:
            yield f"{field.name}={getattr(cost, field.name)}: step costs must not be negative"


def _incidents(c: ClusterConfig) -> Iterator[str]:
    counts = {
        Incident.GPU: (c.engines * c.ranks, "ranks of all engines"),
        Incident.HOST: (c.engines, "engines"),
        Incident.STORAGE: (c.storage_nodes, "storage nodes"),
        Incident.DEPART: (c.engines, "engines"),
    }
    ticks = [tick for tick, _, _ in c.incidents]
    if ticks != sorted(ticks) or (ticks and ticks[0] < 0):
        yield f"incidents at ticks {ticks}: must ascend from 0 on"
    for entry in c.incidents:
        if entry[1] not in counts:
            yield f"incidents holds {entry}: use {', '.join(kind.name for kind in Incident)}"
            continue
        count, name = counts[Incident(entry[1])]
        if not 0 <= entry[2] < count:
            yield f"incidents holds {entry}: there are {count} {name}, counted from 0"
    if c.storage_read_ticks > LONGEST_ACCESS:
        yield f"storage_read_ticks={c.storage_read_ticks}: exceeds {LONGEST_ACCESS}, about five minutes"
    if not NEEDED <= c.storage_asked <= FRAGMENTS:
        yield f"storage_asked={c.storage_asked}: a read needs {NEEDED} of {FRAGMENTS} fragments; ask so many"
    if 0 < c.storage_nodes < FRAGMENTS:
        yield f"storage_nodes={c.storage_nodes}: a block has fragments on {FRAGMENTS} nodes; use as many or more"


def _scaling(c: ClusterConfig) -> Iterator[str]:
    for name, mode in (("scale_prompt", Mode.PROMPT), ("scale_decode", Mode.COMPLETION)):
        pool: Pool | None = getattr(c, name)
        if pool is None:
            continue
        engines = sum(m == mode for m in c.modes)
        if not 0 <= pool.minimum <= pool.initial <= pool.maximum <= engines:
            yield (
                f"{name}={pool}: must hold 0 <= minimum <= initial <= maximum <= {engines}, the "
                f"{mode.name} engines there are"
            )
        if pool.capacity < 1 or min(pool.spare, pool.step_up, pool.step_down) < 0:
            yield f"{name}={pool}: capacity must be at least 1, spare and steps at least 0"
    if c.scaling and c.scale_round_ticks == FOREVER:
        yield "scale_prompt or scale_decode is set, but no round ever comes; set scale_round_ticks"
    if not c.hold_above >= 0:
        yield f"hold_above={c.hold_above}: must be at least 0; inf never holds"
    if c.warm_engine in range(c.engines) and not c.serving_at_first[c.warm_engine]:
        yield f"warm_engine={c.warm_engine} is off at time zero; choose one that serves"


def _ignored(c: ClusterConfig) -> Iterator[str]:
    """Options that differ from their defaults although nothing reads them."""
    for name, otherwise in unread(c):
        value = f"={getattr(c, name)!r}" if hasattr(c, name) else ""
        yield f"{name}{value} is set, but {otherwise}"
