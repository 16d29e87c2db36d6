"""From a `ServiceConfig` to the exact units of `ClusterConfig`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.cost import hardware as devices
from deepinfer_jax.cost.coefficients import CoefficientError, step_cost
from deepinfer_jax.cost.hardware import GIB, Hardware
from deepinfer_jax.cost.memory import kv_blocks_per_rank
from deepinfer_jax.cost.roofline import Efficiency
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, TICKS_PER_SECOND, StepCost
from deepinfer_jax.layout import block_layout, state_layout
from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator import service as friendly
from deepinfer_jax.simulator.checks import check_cluster
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Incident, Mode, Pool
from deepinfer_jax.simulator.options import only_read
from deepinfer_jax.simulator.plain_config import choose, nearest
from deepinfer_jax.simulator.schedule import incidents
from deepinfer_jax.simulator.service import RooflineCost, SecondsCost, ServiceConfig
from deepinfer_jax.simulator.unused import RATES, unused

MODELS = ("v41_flash", "small", "tiny")
KV = ("hbm", "blocks", "unlimited")
READING_SECONDS, COMPUTING_SECONDS = 3, 5
"""DualPath's alpha and beta (arXiv 2602.21548, section 4) in seconds of reading and of prefill."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """A cluster, and how it came about."""

    cluster: ClusterConfig
    gpus: int
    cost_error: CoefficientError | None  # of the affine forms against the roofline
    kv_from_hbm: int | None  # blocks per rank that `memory.kv = "hbm"` found


def translate(service: ServiceConfig, seed: int = 0) -> Translation:
    """The cluster that `service` describes; `seed` feeds policies' draws and speculation.

    Raises:
      ValueError: a contradiction, an unknown name, or an option that nothing would read.
    """
    model, hardware = _model(service), _hardware(service)
    cost, error = _cost(service, model, hardware)
    found = _kv_blocks(service, model, hardware)
    cluster = _cluster(service, model, hardware, cost, found, seed)
    derived = _policy_parameters(service, cluster)
    cluster = dataclasses.replace(cluster, policy=derived)
    for problem in unused(service, cluster):
        raise ValueError(problem)
    cluster = only_read(cluster)  # what a model or a hardware offers and nobody asks for
    check_cluster(cluster)
    registry.resolve("prefill", cluster.prefill_policy)
    registry.resolve("decode", cluster.decode_policy)
    from_hbm = found if service.memory.kv == "hbm" else None
    return Translation(cluster, service.engines.gpus, error, from_hbm)


def _model(service: ServiceConfig) -> ModelConfig | None:
    if not service.model:
        return None
    made: ModelConfig = getattr(presets, choose("model", service.model, MODELS))()
    return made


def _hardware(service: ServiceConfig) -> Hardware | None:
    return devices.resolve(service.hardware) if service.hardware else None


def _cost(
    service: ServiceConfig, model: ModelConfig | None, hardware: Hardware | None
) -> tuple[StepCost, CoefficientError | None]:
    c = service.cost
    if isinstance(c, RooflineCost):
        if model is None or hardware is None:
            raise ValueError(
                f"cost.kind='roofline' needs a model and a hardware, but model={service.model!r}, "
                f"hardware={service.hardware!r}: name both, or give cost.kind='seconds'"
            )
        efficiency = Efficiency(
            compute=c.compute_efficiency,
            memory=c.memory_efficiency,
            exchange=c.exchange_efficiency,
            exposed_exchange=c.exposed_exchange,
            overhead=c.overhead_seconds,
        )
        return step_cost(
            model,
            hardware,
            ranks=service.engines.ranks,
            nextn=service.decode.nextn,
            efficiency=efficiency,
        )
    return _explicit(c), None


def _explicit(c: SecondsCost) -> StepCost:
    f = _femtoseconds
    return StepCost(
        prefill_base=f("cost.prefill_step", c.prefill_step),
        prefill_token=f("cost.prefill_token", c.prefill_token),
        prefill_pair=f("cost.prefill_pair", c.prefill_pair),
        prefill_context=f("cost.prefill_context_token", c.prefill_context_token),
        prefill_exchange_base=f("cost.prefill_exchange_step", c.prefill_exchange_step),
        prefill_exchange_token=f("cost.prefill_exchange_token", c.prefill_exchange_token),
        decode_forms=tuple(
            tuple(f("cost.decode_forms", x) for x in form) for form in c.decode_forms
        ),
        decode_exchange_base=f("cost.decode_exchange_step", c.decode_exchange_step),
        decode_exchange_row=f("cost.decode_exchange_request", c.decode_exchange_request),
    )


def _kv_blocks(
    service: ServiceConfig, model: ModelConfig | None, hardware: Hardware | None
) -> int | None:
    m = service.memory
    if choose("memory.kv", m.kv, KV) == "unlimited":
        return None
    if m.kv == "blocks":
        return m.kv_blocks
    if model is None or hardware is None:
        raise ValueError(
            "memory.kv='hbm' needs a model and a hardware to know what weights leave: name both, "
            "or give memory.kv='blocks'"
        )
    return kv_blocks_per_rank(
        model,
        hardware,
        service.engines.ranks,
        service.engines.slots,
        cache=_layout_config(service),
        hbm_share=m.hbm_share,
        reserved_gib=m.reserved_gib,
    )


def _layout_config(service: ServiceConfig) -> CacheConfig:
    return CacheConfig(block_tokens=service.memory.block_tokens)


def _bytes(service: ServiceConfig, model: ModelConfig | None) -> dict[str, Any]:
    """Bytes of a block, of a stored state and of a handed-over one."""
    m = service.memory
    own = {"block_bytes": m.block_bytes, "swa_bytes": m.state_bytes, "live_bytes": m.live_bytes}
    if model is None:
        return own
    cache = _layout_config(service)
    state = state_layout(model, cache)
    laid_out = {
        "block_bytes": block_layout(model, cache).payload,
        "swa_bytes": state.stored_bytes,
        "live_bytes": state.handoff_bytes,
    }
    return {name: own[name] or laid_out[name] for name in own}


def _cluster(
    service: ServiceConfig,
    model: ModelConfig | None,
    hardware: Hardware | None,
    cost: StepCost,
    kv_blocks: int | None,
    seed: int,
) -> ClusterConfig:
    e, cache, links, prefill = service.engines, service.cache, service.links, service.prefill
    sizes = _bytes(service, model)
    shared, blocks = cache.scope == "shared", sizes["block_bytes"] > 0
    rates = {
        "fetch": shared and blocks,
        "state": shared and cache.swa and sizes["swa_bytes"] > 0,
        "handoff": e.prompt > 0 and (blocks or sizes["live_bytes"] > 0),
    }
    speeds: dict[str, Any] = {
        RATES[link]: _rate(service, hardware, link) if moves else 0 for link, moves in rates.items()
    }
    return ClusterConfig(
        modes=(Mode.PROMPT,) * e.prompt
        + (Mode.COMPLETION,) * e.completion
        + (Mode.NORMAL,) * e.normal
        + (Mode.MIXED,) * e.mixed,
        ranks=e.ranks,
        slots=e.slots,
        kv_blocks=kv_blocks,
        block_tokens=service.memory.block_tokens,
        max_input_tokens=_count("prefill.max_input_tokens", prefill.max_input_tokens),
        cost=cost,
        match_ticks=_ticks("cache.match_seconds", cache.match_seconds),
        cache_scope=cache.scope,
        cache_blocks=_cache_blocks(service, sizes["block_bytes"]),
        reserve=cache.reserve,
        write_back_ticks=_ticks("cache.write_back_seconds", cache.write_back_seconds),
        publish_output=cache.publish_output,
        swa=cache.swa,
        swa_ttl_ticks=_ticks("cache.swa_ttl_seconds", cache.swa_ttl_seconds),
        swa_anchors=cache.swa_anchors,
        prefill_policy=service.policy.prefill,
        tier_edges=service.tiers.edges,
        tier_engines=service.tiers.engines,
        tier_quota=tuple(_ticks("tiers.quota_seconds", x) for x in service.tiers.quota_seconds),
        tier_round_ticks=_ticks("tiers.round_seconds", service.tiers.round_seconds),
        fetch_link=links.fetch_order,
        fetch_ticks=_ticks("links.fetch_seconds", links.fetch_seconds),
        step_quota=_femtoseconds("prefill.step_quota_seconds", prefill.step_quota_seconds),
        batch_tokens=_count("prefill.batch_tokens", prefill.batch_tokens),
        batch_requests=_count("prefill.batch_requests", prefill.batch_requests),
        chunk_multiple=_count("prefill.chunk_multiple", prefill.chunk_multiple),
        decode_policy=service.policy.decode,
        handoff_link=links.handoff_order,
        handoff_ticks=_ticks("links.handoff_seconds", links.handoff_seconds),
        nextn=service.decode.nextn,
        acceptance=service.decode.acceptance,
        prompt_interval=service.decode.prompt_interval,
        prompt_any_interval=service.decode.prompt_any_interval,
        prompt_usage_limit=service.decode.prompt_usage_limit,  # type: ignore[arg-type]
        token_times=service.decode.record_tokens,
        seed=seed,
        **speeds,
        **sizes,
        **_retention(service, _cache_blocks(service, sizes["block_bytes"])),
        **_storage(service),
        **_failures(service, seed),
        **_scaling(service),
    )


def _storage(service: ServiceConfig) -> dict[str, Any]:
    s = service.storage
    if not s.bytes_per_second > 0:
        raise ValueError(
            f"storage.bytes_per_second={s.bytes_per_second}: must be positive; inf makes links free"
        )
    return {
        "storage_read_ticks": _ticks("storage.read_seconds", s.read_seconds),
        "storage_femtoseconds_per_byte": round(FEMTOSECONDS_PER_SECOND / s.bytes_per_second),
        "storage_asked": s.asked,
        "stripe_blocks": s.stripe_blocks,
    }


def _retention(service: ServiceConfig, capacity: int) -> dict[str, Any]:
    r = service.cache.retention
    ttl = tuple(_ticks("cache.retention.ttl_seconds", x) for x in r.ttl_seconds)
    marks = {"high": r.high, "low": r.low}
    if (r.high < math.inf) != (r.low < math.inf) or not 0 <= r.low <= r.high:
        raise ValueError(
            f"cache.retention.high={r.high}, low={r.low}: give both shares, 0 <= low <= high <= 1, "
            "or none"
        )
    if r.high < math.inf and capacity == FOREVER:
        raise ValueError(
            f"cache.retention.high={r.high} is a share of the capacity, but the cache has none; "
            "set cache.capacity_blocks or cache.capacity_gib"
        )
    shares = {
        f"retention_{name}_blocks": FOREVER if share == math.inf else int(share * capacity)
        for name, share in marks.items()
    }
    return shares | {
        "retention_sweep_ticks": _ticks("cache.retention.sweep_seconds", r.sweep_seconds),
        "retention_ttl_ticks": ttl,
        "retention_precedence": r.precedence,
    }


def _failures(service: ServiceConfig, seed: int) -> dict[str, Any]:
    f, e = service.failures, service.engines
    counts = {
        Incident.GPU: e.total * e.ranks,
        Incident.HOST: e.total,
        Incident.STORAGE: f.storage_nodes,
    }
    return {
        "incidents": incidents(f, counts, seed),
        "restart_ticks": _ticks("failures.restart_seconds", f.restart_seconds),
        "repair_ticks": _ticks("failures.repair_seconds", f.repair_seconds),
        "retry_limit": f.retry_limit,
        "storage_nodes": f.storage_nodes,
        "storage_repair_ticks": _ticks("failures.storage_repair_seconds", f.storage_repair_seconds),
    }


def _scaling(service: ServiceConfig) -> dict[str, Any]:
    s = service.scaling
    return {
        "scale_prompt": _pool("scaling.prompt.capacity", s.prompt, s.round_seconds),
        "scale_decode": _pool("scaling.completion.capacity", s.completion, 1.0),
        "scale_round_ticks": _ticks("scaling.round_seconds", s.round_seconds),
        "start_ticks": _ticks("scaling.start_seconds", s.start_seconds),
        "grace_ticks": _ticks("scaling.grace_seconds", s.grace_seconds),
        "hold_above": s.hold_above,
    }


def _pool(name: str, pool: friendly.Pool | None, rounds: float) -> Pool | None:
    """The pool with its capacity per round."""
    if pool is None:
        return None
    capacity = _count(name, pool.capacity * rounds)
    return Pool(**(dataclasses.asdict(pool) | {"capacity": capacity}))


def _cache_blocks(service: ServiceConfig, block_bytes: int) -> int:
    cache = service.cache
    if cache.capacity_gib < math.inf and cache.capacity_blocks < math.inf:
        raise ValueError(
            f"cache.capacity_gib={cache.capacity_gib} and cache.capacity_blocks="
            f"{cache.capacity_blocks}: they say the same thing, give one"
        )
    if cache.capacity_gib < math.inf:
        if not block_bytes:
            raise ValueError("cache.capacity_gib needs memory.block_bytes or a model: give one")
        return int(cache.capacity_gib * GIB // block_bytes)
    return _count("cache.capacity_blocks", cache.capacity_blocks)


def _rate(service: ServiceConfig, hardware: Hardware | None, link: str) -> int:
    """Femtoseconds per byte of an engine's link."""
    key = f"links.{link}_bytes_per_second"
    rate = getattr(service.links, f"{link}_bytes_per_second")
    if rate is None and hardware is None:
        raise ValueError(f"{key} is not given and there is no hardware to take it from: set it")
    if rate is None:
        assert hardware is not None
        own = hardware.storage_bytes_per_second, hardware.scale_out_bytes_per_second
        rate = own[0] if link == "fetch" else own[1]
    if not rate > 0:
        raise ValueError(f"{key}={rate}: must be positive; inf makes the link free")
    return round(FEMTOSECONDS_PER_SECOND / (rate * service.engines.ranks))


def _scaled(name: str, value: float, scale: int) -> int:
    if value < 0:
        raise ValueError(f"{name}={value}: must not be negative; give 0 or more")
    scaled = value * scale
    return FOREVER if scaled >= FOREVER else round(scaled)


def _ticks(name: str, seconds: float) -> int:
    return _scaled(name, seconds, TICKS_PER_SECOND)


def _femtoseconds(name: str, seconds: float) -> int:
    return _scaled(name, seconds, FEMTOSECONDS_PER_SECOND)


def _count(name: str, value: float) -> int:
    return _scaled(name, value, 1)


def _policy_parameters(service: ServiceConfig, cluster: ClusterConfig) -> dict[str, Any]:
    given = dict(service.policy.parameters)
    known = [field.name for field in dataclasses.fields(PolicyParameters)]
    for name in given:
        if name not in known:
            raise ValueError(
                f"policy.parameters.{name} is unknown: did you mean {nearest(name, known)}?"
            )
    derived: dict[str, Any] = {}
    if service.policy.prefill == "dualpath":
        cost, step = cluster.cost, 8192
        seconds = (cost.prefill_base + cost.prefill_work(step, 0)) / FEMTOSECONDS_PER_SECOND
        derived["token_beta"] = round(COMPUTING_SECONDS * step / seconds) * cluster.ranks
        per_token = cluster.fetch_femtoseconds_per_byte * cluster.block_bytes / cluster.block_tokens
        reading = READING_SECONDS * FEMTOSECONDS_PER_SECOND
        derived["reading_alpha"] = round(reading / per_token) if per_token else FOREVER
    if service.policy.prefill == "mooncake":
        per_block = cluster.handoff_femtoseconds_per_byte * cluster.block_bytes / 10**6
        derived["transfer_ticks_per_token"] = round(per_block / cluster.block_tokens)
    return derived | given
