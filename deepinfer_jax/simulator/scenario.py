"""Splits a `ClusterConfig` into what compiles (`Shape`) and what may vary in one compilation (`Scenario`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator.checks import check_cluster, check_traffic, check_warm
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig
from deepinfer_jax.simulator.workload import Workload

SERIES_BINS = 200
"""Bins of the busy-time series; bin width is a scenario number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and switches that select the compiled program. Hashable; equal shapes share a compilation."""

    requests: int  # Q
    nodes: int  # N
    engines: int  # M
    ranks: int  # J per engine
    slots: int  # S per rank
    tiers: int  # T
    forms: int  # F
    nextn: int
    warm: int
    cache_scope: str
    bounded_cache: bool
    swa: bool
    swa_anchors: str
    kv_limited: bool
    fetches: bool
    fetch_fifo: bool
    handoff_fifo: bool
    write_back: bool
    publish_output: bool
    retention: str  # precedence of the sweep, "" without one
    watermark: bool  # sweeps look at the blocks held, too
    rematches: bool
    closed_loop: bool
    prompt: bool  # modes present
    completion: bool
    normal: bool
    mixed: bool
    pull: bool
    prefill_policy: Callable[..., Any] | None
    decode_policy: Callable[..., Any]
    exact: bool  # integer time
    token_log: bool
    dynamics: bool  # any of those below
    incidents: int  # entries of the list, padded
    crashes: bool
    departures: bool
    storage_nodes: int
    storage_reads: bool
    scale_prompt: bool
    scale_decode: bool

    @property
    def caches(self) -> int:
        return {"none": 0, "shared": 1, "local": self.engines}[self.cache_scope]

    @property
    def scaling(self) -> bool:
        return self.scale_prompt or self.scale_decode

    @property
    def rounds(self) -> bool:
        return self.tiers > 1 or self.scaling

    @property
    def all_ranks(self) -> int:
        return self.engines * self.ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics:
    """The numbers of `SEMANTICS.md` section 11; int64 (or float64 time) scalars unless a shape is given."""

    incident_time: Any  # [I], NEVER from the last real one on
    incident_kind: Any  # [I]
    incident_index: Any  # [I]
    serving_at_first: Any  # [M] bool
    restart_ticks: Any
    repair_ticks: Any
    retry_limit: Any
    storage_repair_ticks: Any
    scale_round_ticks: Any
    start_ticks: Any
    grace_ticks: Any
    hold_above: Any
    pools: Any  # [2, 6] prompt, decode; capacity, minimum, maximum, spare, step_up, step_down


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """The numbers of `SEMANTICS.md` section 13; int64 (or float64 time) scalars unless a shape is given."""

    sweep_ticks: Any
    ttl_ticks: Any  # [classes]
    high_blocks: Any
    low_blocks: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """The numbers of one scenario: int64 (or float64 time) scalars unless a shape is given."""

    modes: Any  # [M] Mode
    cost: StepCost
    kv_blocks: Any
    block_tokens: Any
    max_input_tokens: Any
    match_ticks: Any
    cache_blocks: Any
    reserve: Any
    write_back_ticks: Any
    swa_ttl_ticks: Any
    warm_requests: Any  # [warm]
    warm_engine: Any
    tier_edges: Any  # [T - 1]
    tier_engines: Any  # [M] tier of each engine at time zero
    tier_quota: Any  # [T]
    tier_round_ticks: Any
    fetch_ticks: Any
    fetch_rate: Any  # fs per byte
    swa_rate: Any
    block_bytes: Any
    swa_bytes: Any
    step_quota: Any
    batch_tokens: Any
    batch_requests: Any
    chunk_multiple: Any
    handoff_ticks: Any
    handoff_rate: Any
    live_bytes: Any
    survival: Any  # [nextn] thresholds of 53 bits
    prompt_interval: Any
    prompt_any_interval: Any
    prompt_usage_limit: Any  # [2] numerator, denominator
    stripe_blocks: Any
    storage_read_ticks: Any
    storage_rate: Any
    storage_asked: Any
    seed: Any
    policy: PolicyParameters
    bin_ticks: Any
    dynamics: Dynamics | None = None
    retention: Retention | None = None


TIMES = frozenset(
    [
        "match_ticks",
        "write_back_ticks",
        "swa_ttl_ticks",
        "tier_quota",
        "tier_round_ticks",
        "fetch_ticks",
        "fetch_rate",
        "swa_rate",
        "step_quota",
        "handoff_ticks",
        "handoff_rate",
        "bin_ticks",
        "incident_time",
        "restart_ticks",
        "repair_ticks",
        "storage_repair_ticks",
        "storage_read_ticks",
        "storage_rate",
        "scale_round_ticks",
        "start_ticks",
        "grace_ticks",
        "sweep_ticks",
        "ttl_ticks",
    ]
)
"""Fields measured in time; they, the step costs and the arrivals are floats in the float time type."""


def survival_thresholds(acceptance: tuple[float, ...]) -> np.ndarray:
    return np.floor(2.0**53 * np.cumprod(np.asarray(acceptance, np.float64))).astype(np.int64)


def _initial_tiers(cluster: ClusterConfig) -> np.ndarray:
    serving = cluster.serving_at_first
    takers = [m for m, mode in enumerate(cluster.modes) if mode != 1 and serving[m]]
    counts = cluster.tier_engines or tuple(
        len(takers) // cluster.tiers + (t < len(takers) % cluster.tiers)
        for t in range(cluster.tiers)
    )
    tiers = np.zeros(cluster.engines, np.int64)
    tiers[takers] = np.repeat(np.arange(cluster.tiers), counts)[: len(takers)]
    return tiers


def split(
    cluster: ClusterConfig,
    workload: Workload,
    *,
    exact: bool = True,
    horizon_ticks: int | None = None,
) -> tuple[Shape, Scenario]:
    """Shape and numbers of `cluster` serving `workload`; raises ValueError on a contradictory config.

    `horizon_ticks` sets the span of the busy-time series (default: twice the last arrival).
    """
    check_cluster(cluster)
    if cluster.token_times and not exact:
        raise ValueError(
            "token_times=True needs integer time, but exact=False: leave one of them out"
        )
    check_warm(cluster, workload.requests)
    check_traffic(cluster, classes(workload))
    return _shape(cluster, workload, exact), _numbers(cluster, workload, exact, horizon_ticks)


def _shape(cluster: ClusterConfig, workload: Workload, exact: bool) -> Shape:
    present = {mode: mode in cluster.modes for mode in range(4)}
    pull = cluster.prefill_policy == "pull"
    caching = cluster.cache_scope != "none"
    shared = cluster.cache_scope == "shared"
    return Shape(
        requests=len(workload.arrival),
        nodes=len(workload.node_parent) if caching else 1,
        engines=cluster.engines,
        ranks=cluster.ranks,
        slots=cluster.slots,
        tiers=cluster.tiers,
        forms=len(cluster.cost.decode_forms),
        nextn=cluster.nextn,
        warm=len(cluster.warm_requests) if caching else 0,
        cache_scope=cluster.cache_scope,
        bounded_cache=caching and cluster.cache_blocks < FOREVER,
        swa=cluster.swa and caching,
        swa_anchors=cluster.swa_anchors,
        kv_limited=cluster.kv_blocks is not None,
        fetches=shared
        and cluster.storage_reads
        + cluster.fetch_ticks
        + cluster.fetch_femtoseconds_per_byte * cluster.block_bytes
        + cluster.swa_femtoseconds_per_byte * cluster.swa_bytes
        > 0,
        fetch_fifo=cluster.fetch_link == "fifo",
        handoff_fifo=cluster.handoff_link == "fifo",
        write_back=caching and cluster.write_back_ticks > 0,
        publish_output=caching and cluster.publish_output,
        retention=cluster.retention_precedence if cluster.retention else "",
        watermark=cluster.retention_high_blocks < FOREVER,
        rematches=(cluster.kv_blocks is not None and present[1])
        or cluster.crashes
        or workload.after is not None,
        closed_loop=workload.after is not None,
        prompt=present[0],
        completion=present[1],
        normal=present[2],
        mixed=present[3],
        pull=pull,
        prefill_policy=None if pull else registry.resolve("prefill", cluster.prefill_policy),
        decode_policy=registry.resolve("decode", cluster.decode_policy),
        exact=exact,
        token_log=cluster.token_times,
        dynamics=bool(cluster.incidents) or cluster.scaling,
        incidents=_padded(len(cluster.incidents)),
        crashes=cluster.crashes,
        departures=cluster.departures,
        storage_nodes=cluster.storage_nodes,
        storage_reads=cluster.storage_reads,
        scale_prompt=cluster.scale_prompt is not None,
        scale_decode=cluster.scale_decode is not None,
    )


def _padded(incidents: int) -> int:
    """Room for one more than `incidents`, a power of two, so that sweeps share a shape."""
    return 1 << incidents.bit_length() if incidents else 0


def _dynamics(cluster: ClusterConfig, exact: bool) -> Dynamics | None:
    if not (cluster.incidents or cluster.scaling):
        return None
    never = [(FOREVER, 0, 0)] * (_padded(len(cluster.incidents)) - len(cluster.incidents))
    table = np.asarray([*cluster.incidents, *never], np.int64).reshape(-1, 3)
    names = ("capacity", "minimum", "maximum", "spare", "step_up", "step_down")
    values = {
        "incident_time": table[:, 0],
        "incident_kind": table[:, 1],
        "incident_index": table[:, 2],
        "serving_at_first": np.asarray(cluster.serving_at_first, np.int64),
        "pools": [
            [getattr(pool, name) if pool else 1 for name in names]
            for pool in (cluster.scale_prompt, cluster.scale_decode)
        ],
    }
    for field in dataclasses.fields(Dynamics):
        value = values.get(field.name, getattr(cluster, field.name, None))
        values[field.name] = _number(value, field.name in TIMES and not exact)
    return Dynamics(**values)


def classes(workload: Workload) -> int:
    """Traffic classes of a workload."""
    return 1 if workload.traffic is None else int(np.max(workload.traffic)) + 1


def _retention(cluster: ClusterConfig, workload: Workload, exact: bool) -> Retention | None:
    if not cluster.retention:
        return None
    ttl = cluster.retention_ttl_ticks or (FOREVER,) * classes(workload)
    values = {"ttl_ticks": ttl}
    for name in ("sweep_ticks", "high_blocks", "low_blocks"):
        values[name] = getattr(cluster, f"retention_{name}")
    return Retention(**{n: _number(v, n in TIMES and not exact) for n, v in values.items()})


def _numbers(
    cluster: ClusterConfig, workload: Workload, exact: bool, horizon_ticks: int | None
) -> Scenario:
    horizon = horizon_ticks or 2 * int(workload.arrival[-1]) + 10**9
    values: dict[str, Any] = dict(  # noqa: C408 (field names read better as keywords)
        modes=np.asarray(cluster.modes, np.int64),
        cost=cluster.cost,
        kv_blocks=cluster.kv_blocks or 0,
        fetch_rate=cluster.fetch_femtoseconds_per_byte,
        swa_rate=cluster.swa_femtoseconds_per_byte,
        handoff_rate=cluster.handoff_femtoseconds_per_byte,
        storage_rate=cluster.storage_femtoseconds_per_byte,
        tier_engines=_initial_tiers(cluster),
        survival=survival_thresholds(cluster.acceptance[: cluster.nextn]),
        policy=dataclasses.replace(
            PolicyParameters(block_tokens=cluster.block_tokens), **cluster.policy
        ),
        bin_ticks=max(1, horizon // SERIES_BINS),
    )
    for field in dataclasses.fields(Scenario):
        if field.name not in values and field.name not in ("dynamics", "retention"):
            values[field.name] = np.asarray(getattr(cluster, field.name))
    cost, policy = values.pop("cost"), values.pop("policy")
    forms = _number(cost.decode_forms, not exact)
    cost = dataclasses.replace(cost, decode_forms=0)
    cost = jax.tree.map(lambda x: _number(x, not exact), cost)
    numbers = {name: _number(value, name in TIMES and not exact) for name, value in values.items()}
    if not exact:
        # Remaining quota is cap - used: next to 2**62 a float would swallow the difference.
        numbers["tier_quota"] = np.minimum(numbers["tier_quota"], 2.0**48)
    return Scenario(
        cost=dataclasses.replace(cost, decode_forms=forms),
        policy=jax.tree.map(lambda x: _number(x, False), policy),
        dynamics=_dynamics(cluster, exact),
        retention=_retention(cluster, workload, exact),
        **numbers,
    )


def _number(value: Any, as_time: bool) -> np.ndarray:
    value = np.asarray(value)
    kind = np.float64 if as_time or value.dtype.kind == "f" else np.int64
    return value.astype(kind)
