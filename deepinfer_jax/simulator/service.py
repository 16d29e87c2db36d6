"""The service as a person describes it: engines, hardware, seconds, bytes per second and GiB.

`translate.cluster` turns a `ServiceConfig` into the exact integer units of `ClusterConfig`; what
each number does is defined in `SEMANTICS.md`. `math.inf` means no limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.simulator.plain_config import build, choose

INF = math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines by mode. An engine is one group of `ranks` that step together (EP = DP)."""

    prompt: int = 0
    completion: int = 0
    normal: int = 0
    mixed: int = 0
    ranks: int = 1
    gpus_per_rank: int = 1  # only counted (GPU-hours); the cost is that of a whole rank
    slots: int = 256  # running requests per rank

    @property
    def total(self) -> int:
        return self.prompt + self.completion + self.normal + self.mixed

    @property
    def gpus(self) -> int:
        return self.total * self.ranks * self.gpus_per_rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """Step times of `model` on `hardware`: peaks times the shares reached, see `cost.roofline`."""

    kind: str = "roofline"
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    exchange_efficiency: float = 1.0
    exposed_exchange: float = 1.0
    overhead_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondsCost:
    """Step times by their coefficients, in seconds; see `cost.steps.StepCost` for the formulas."""

    kind: str = "seconds"
    prefill_step: float
    prefill_token: float
    prefill_pair: float = 0.0
    prefill_context_token: float = 0.0
    prefill_exchange_step: float = 0.0
    prefill_exchange_token: float = 0.0
    decode_forms: tuple[tuple[float, float, float], ...]  # (step, request, KV token), the maximum
    decode_exchange_step: float = 0.0
    decode_exchange_request: float = 0.0


COSTS = {"roofline": RooflineCost, "seconds": SecondsCost}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """KV blocks, and the bytes that links move. Bytes of 0 are the model's own layout."""

    block_tokens: int = 128
    kv: str = "unlimited"  # "hbm": what weights leave of it; "blocks": `kv_blocks`; "unlimited"
    kv_blocks: int = 0  # per rank
    hbm_share: float = 0.9
    reserved_gib: float = 4.0  # activations, buffers, compiled programs
    block_bytes: int = 0
    state_bytes: int = 0  # a stored sliding-window state
    live_bytes: int = 0  # the state that a hand-off carries besides blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """The garbage collector of a cache, see `SEMANTICS.md` section 13. Off without `sweep_seconds`."""

    sweep_seconds: float = INF
    ttl_seconds: tuple[
        float, ...
    ] = ()  # by traffic class of the workload; () lets all live for ever
    high: float = INF  # share of the capacity above which a sweep frees down to `low`
    low: float = INF
    precedence: str = "age_first"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Prefix cache: none, one shared store, or one local to each engine."""

    scope: str = "none"
    capacity_gib: float = INF  # of the shared store, or of each engine
    capacity_blocks: float = INF  # the same as a count; give one of the two
    reserve: int = 134  # last prompt tokens that no hit may cover
    match_seconds: float = 0.0
    write_back_seconds: float = 0.0
    publish_output: bool = False
    swa: bool = False  # a hit needs the sliding-window state at its end, or backs off a block
    swa_ttl_seconds: float = INF
    swa_anchors: str = "prompt_end"
    retention: Retention = Retention()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second of one rank's links; an engine's are `ranks` times as fast.

    None is the hardware's own: storage network for fetches, compute network for the others.
    """

    fetch_bytes_per_second: float | None = None
    fetch_seconds: float = 0.0  # latency of each fetch
    fetch_order: str = "unlimited"  # or "fifo": one at a time per engine
    state_bytes_per_second: float | None = None
    handoff_bytes_per_second: float | None = None
    handoff_seconds: float = 0.0
    handoff_order: str = "unlimited"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How the nodes of `failures.storage_nodes` serve reads of a shared cache (`SEMANTICS.md` section 15)."""

    read_seconds: float = 0.0  # mean access time of a node, exponential
    bytes_per_second: float = INF  # of a node's link
    asked: int = 11  # holders of a stripe that a read asks; it ends at the tenth reply
    stripe_blocks: int = 1  # blocks that are coded together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """What a prompt step takes, per rank."""

    max_input_tokens: float = INF
    step_quota_seconds: float = INF  # predicted time of a batch
    batch_tokens: float = INF  # MIXED: decode rows count too
    batch_requests: float = INF
    chunk_multiple: float = 128  # inf: a prompt is never cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Tiers of total context for the policy "pull"; a tier of engines pulls its own queue."""

    edges: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()  # at time zero; () deals them evenly
    quota_seconds: tuple[float, ...] = (INF,)  # cap of predicted work per engine, one per tier
    round_seconds: float = INF  # how often engines are dealt anew


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Speculation, and the votes of NORMAL engines between prompt and decode steps."""

    nextn: int = 0
    record_tokens: bool = False  # when each token was sent, for ITL
    acceptance: tuple[float, ...] = ()  # of each draft position, given that those before held
    prompt_interval: int = 70
    prompt_any_interval: int = 100
    prompt_usage_limit: tuple[int, ...] = (9, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Placement policies by name or as "package.module:function", and their parameters.

    Parameters not given are derived where a rule is known: DualPath's `reading_alpha` is what the
    fetch link reads in 3 s, its `token_beta` what an engine computes in 5 s, and Mooncake's
    `transfer_ticks_per_token` follows from the hand-off link.
    """

    prefill: str = "pull"
    decode: str = "two_load"
    parameters: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """What breaks and when, and how the service comes back; see `SEMANTICS.md` section 11.

    A GPU is a rank of an engine, a host the machine of one: engine `m` has the ranks from
    `m * ranks` on. Rates are per part; what they draw depends on the seed and the part alone.
    """

    events: tuple[
        tuple[Any, ...], ...
    ] = ()  # (seconds, "gpu" | "host" | "storage" | "depart", index)
    gpu_per_hour: float = 0.0
    host_per_hour: float = 0.0
    storage_per_hour: float = 0.0
    until_seconds: float = 0.0  # of the rates
    restart_seconds: float = 0.0
    repair_seconds: float = INF  # of a GPU; its engine takes it in at its next start
    retry_limit: int = 3
    storage_nodes: int = 0
    storage_repair_seconds: float = INF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Limits of one scaled pool, in engines.

    `capacity` is what one engine carries at full use: new prompt tokens per second of a prompt
    engine, running requests of a completion engine.
    """

    initial: int
    maximum: int
    capacity: float
    minimum: int = 1
    spare: int = 0
    step_up: int = 1
    step_down: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling loop; `engines.prompt` and `engines.completion` are the most there can be."""

    prompt: Pool | None = None
    completion: Pool | None = None
    round_seconds: float = INF
    start_seconds: float = 0.0
    grace_seconds: float = 60.0  # of a completion engine that leaves, planned by hand too
    hold_above: float = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """A service, its requests apart. `service` builds one from plain values."""

    engines: Engines
    cost: RooflineCost | SecondsCost = RooflineCost()
    model: str = ""  # a function of `presets`; "" where nothing depends on the model
    hardware: str = ""  # a preset of `cost.hardware`, or a JSON file of your own; "" likewise
    memory: Memory = Memory()
    cache: Cache = Cache()
    links: Links = Links()
    storage: Storage = Storage()
    prefill: Prefill = Prefill()
    tiers: Tiers = Tiers()
    decode: Decode = Decode()
    policy: Policy = Policy()
    failures: Failures = Failures()
    scaling: Scaling = Scaling()


def service(values: Mapping[str, Any]) -> ServiceConfig:
    """A `ServiceConfig` from nested plain values, such as a config file's.

    Raises:
      ValueError: an unknown key or kind (with the nearest name) or a value of another type.
    """
    rest = dict(values)
    cost = rest.pop("cost", {})
    kind = choose("cost.kind", cost.get("kind", "roofline"), tuple(COSTS))
    built: RooflineCost | SecondsCost = build(COSTS[kind], cost, "cost")
    made = build(ServiceConfig, rest)
    return dataclasses.replace(made, cost=built)
