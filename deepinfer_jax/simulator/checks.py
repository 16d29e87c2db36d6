"""Refuses clusters that contradict themselves, with the value, the rule and the remedy."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import (
    ANCHORS,
    CACHE_SCOPES,
    FOREVER,
    LINKS,
    ClusterConfig,
    Mode,
)

LONGEST_STEP_SECONDS = 8
"""A decode step's subs must leave room to add a run of them in int64."""


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ValueError for the first broken rule of `cluster`."""
    for problem in (
        *_engines(cluster),
        *_choices(cluster),
        *_caches(cluster),
        *_tiers(cluster),
        *_steps(cluster),
    ):
        raise ValueError(problem)


def _engines(c: ClusterConfig):  # type: ignore[no-untyped-def]
    takers = [m for m in c.modes if m != Mode.COMPLETION]
    if not takers:
        yield f"modes={c.modes}: no engine takes prompts; add a PROMPT, NORMAL or MIXED engine"
    if Mode.PROMPT in c.modes and Mode.COMPLETION not in c.modes:
        yield "modes has PROMPT engines but no COMPLETION engine to hand requests to; add one"
    if Mode.COMPLETION in c.modes and Mode.PROMPT not in c.modes:
        yield "modes has COMPLETION engines but no PROMPT engine to feed them; add one or use NORMAL"
    for name in (
        "ranks",
        "slots",
        "block_tokens",
        "batch_tokens",
        "batch_requests",
        "chunk_multiple",
    ):
        if getattr(c, name) < 1:
            yield f"{name}={getattr(c, name)}: must be at least 1"
    if c.kv_blocks is not None and c.kv_blocks < 1:
        yield f"kv_blocks={c.kv_blocks}: must be positive; use None for no limit"
    if c.nextn and len(c.acceptance) < c.nextn:
        yield f"acceptance has {len(c.acceptance)} positions for nextn={c.nextn}; give one probability each"
    if any(not 0 <= a <= 1 for a in c.acceptance):
        yield f"acceptance={c.acceptance}: conditional probabilities must lie in [0, 1]"


def _choices(c: ClusterConfig):  # type: ignore[no-untyped-def]
    for name, allowed in (
        ("cache_scope", CACHE_SCOPES),
        ("fetch_link", LINKS),
        ("handoff_link", LINKS),
        ("swa_anchors", ANCHORS),
    ):
        if getattr(c, name) not in allowed:
            yield f"{name}={getattr(c, name)!r} is unknown; choose one of {', '.join(allowed)}"


def _caches(c: ClusterConfig):  # type: ignore[no-untyped-def]
    if c.reserve < 1:
        yield f"reserve={c.reserve}: at least one prompt token must be computed; use 1 or more"
    if c.cache_scope == "none":
        unused = [
            n
            for n in ("swa", "publish_output", "warm_requests", "write_back_ticks")
            if getattr(c, n)
        ]
        if unused:
            yield f"{unused[0]} is set but cache_scope='none' ignores it; choose 'shared' or 'local', or unset it"
    if c.cache_scope != "shared" and (c.fetch_ticks or c.fetch_femtoseconds_per_byte):
        yield f"fetch costs are set but cache_scope={c.cache_scope!r} never fetches; choose 'shared' or unset them"
    if not 0 <= c.warm_engine < c.engines:
        yield f"warm_engine={c.warm_engine}: engines are 0..{c.engines - 1}"


def _tiers(c: ClusterConfig):  # type: ignore[no-untyped-def]
    takers = sum(m != Mode.COMPLETION for m in c.modes)
    if c.prefill_policy != "pull" and c.tier_edges:
        yield f"tier_edges is set but prefill_policy={c.prefill_policy!r} has no tiers; use 'pull' or unset it"
    if list(c.tier_edges) != sorted(set(c.tier_edges)):
        yield f"tier_edges={c.tier_edges}: must ascend strictly"
    if len(c.tier_quota) != c.tiers:
        yield f"tier_quota has {len(c.tier_quota)} caps for {c.tiers} tiers; give one each"
    if c.tier_engines and (len(c.tier_engines) != c.tiers or sum(c.tier_engines) != takers):
        yield f"tier_engines={c.tier_engines}: must deal {takers} prompt-taking engines to {c.tiers} tiers"
    if c.tiers > takers:
        yield f"{c.tiers} tiers for {takers} prompt-taking engines: a tier could wait for ever; use fewer tier_edges"
    if c.tiers > 1 and c.tier_round_ticks >= FOREVER and not c.tier_engines:
        return
    if c.tier_round_ticks < 1:
        yield f"tier_round_ticks={c.tier_round_ticks}: must be positive"


def _steps(c: ClusterConfig):  # type: ignore[no-untyped-def]
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
