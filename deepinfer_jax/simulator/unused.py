"""Settings that the described service would silently ignore: each is an error, not a surprise.

A setting that becomes an option of the cluster is read when that option is (`options`); the others
have a rule of their own here. What a model or a hardware offers and nobody asks for is no setting.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.options import OPTIONS, unread_parameters
from deepinfer_jax.simulator.plain_config import changed
from deepinfer_jax.simulator.service import RooflineCost, ServiceConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """Whether anything reads a setting, and what to say otherwise."""

    read: Callable[[ServiceConfig, ClusterConfig], bool]
    otherwise: str


def _failing(*kinds: str) -> Callable[[ServiceConfig, ClusterConfig], bool]:
    """Whether parts of some kinds fail, by hand or at a rate (that may draw nothing in the end)."""

    def read(s: ServiceConfig, c: ClusterConfig) -> bool:
        by_hand = any(event[1] in kinds for event in s.failures.events)
        return by_hand or any(getattr(s.failures, f"{kind}_per_hour", 0) for kind in kinds)

    return read


def _rates(s: ServiceConfig, c: ClusterConfig) -> bool:
    f = s.failures
    return any((f.gpu_per_hour, f.host_per_hour, f.storage_per_hour))


def _reads(c: ClusterConfig, option: str) -> bool:
    return OPTIONS[option].read(c)


def _block_bytes(s: ServiceConfig, c: ClusterConfig) -> bool:
    return _reads(c, "block_bytes") or s.cache.capacity_gib < math.inf


def _model(s: ServiceConfig, c: ClusterConfig) -> bool:
    m = s.memory
    sizes = (_block_bytes(s, c) and not m.block_bytes,
             _reads(c, "swa_bytes") and not m.state_bytes,
             _reads(c, "live_bytes") and not m.live_bytes)  # fmt: skip
    return isinstance(s.cost, RooflineCost) or m.kv == "hbm" or any(sizes)


def _hardware(s: ServiceConfig, c: ClusterConfig) -> bool:
    links = (
        getattr(s.links, f"{link}_bytes_per_second") is None and _reads(c, rate)
        for link, rate in RATES.items()
    )
    return isinstance(s.cost, RooflineCost) or s.memory.kv == "hbm" or any(links)


RATES = {
    "fetch": "fetch_femtoseconds_per_byte",
    "state": "swa_femtoseconds_per_byte",
    "handoff": "handoff_femtoseconds_per_byte",
}
"""The option of the cluster that a link's bytes per second become."""

ALWAYS = Rule(lambda s, c: True, "")
_KV = "memory.kv is another: use {!r}, or unset it"
_CRASH = Rule(_failing("gpu", "host"), "no GPU or host fails: add a rate or an event, or unset it")
_EXCHANGE = Rule(
    lambda s, c: s.engines.ranks > 1, "one rank has nobody to exchange with: use more, or unset it"
)

SETTINGS: Mapping[str, str | Rule] = {
    **{f"engines.{name}": "modes" for name in ("prompt", "completion", "normal", "mixed")},
    "engines.ranks": "ranks",
    "engines.gpus_per_rank": ALWAYS,
    "engines.slots": "slots",
    "model": Rule(_model, "step times, KV blocks and sizes are all given explicitly: leave it out"),
    "hardware": Rule(
        _hardware, "step times, KV blocks and link speeds are all given explicitly: leave it out"
    ),
    "cost.exchange_efficiency": _EXCHANGE,
    "cost.exposed_exchange": _EXCHANGE,
    "memory.block_tokens": "block_tokens",
    "memory.kv": ALWAYS,
    "memory.kv_blocks": Rule(lambda s, c: s.memory.kv == "blocks", _KV.format("blocks")),
    "memory.hbm_share": Rule(lambda s, c: s.memory.kv == "hbm", _KV.format("hbm")),
    "memory.reserved_gib": Rule(lambda s, c: s.memory.kv == "hbm", _KV.format("hbm")),
    "memory.block_bytes": Rule(_block_bytes, OPTIONS["block_bytes"].otherwise),
    "memory.state_bytes": "swa_bytes",
    "memory.live_bytes": "live_bytes",
    "cache.scope": "cache_scope",
    "cache.capacity_gib": "cache_blocks",
    "cache.capacity_blocks": "cache_blocks",
    "cache.reserve": "reserve",
    "cache.match_seconds": "match_ticks",
    "cache.write_back_seconds": "write_back_ticks",
    "cache.publish_output": "publish_output",
    "cache.swa": "swa",
    "cache.swa_ttl_seconds": "swa_ttl_ticks",
    "cache.swa_anchors": "swa_anchors",
    "cache.retention.sweep_seconds": "retention_sweep_ticks",
    "cache.retention.ttl_seconds": "retention_ttl_ticks",
    "cache.retention.high": "retention_high_blocks",
    "cache.retention.low": "retention_low_blocks",
    "cache.retention.precedence": "retention_precedence",
    **{f"links.{link}_bytes_per_second": rate for link, rate in RATES.items()},
    "links.fetch_seconds": "fetch_ticks",
    "links.fetch_order": "fetch_link",
    "links.handoff_seconds": "handoff_ticks",
    "links.handoff_order": "handoff_link",
    "storage.read_seconds": "storage_read_ticks",
    "storage.bytes_per_second": "storage_femtoseconds_per_byte",
    "storage.asked": "storage_asked",
    "storage.stripe_blocks": "stripe_blocks",
    "prefill.max_input_tokens": "max_input_tokens",
    "prefill.step_quota_seconds": "step_quota",
    "prefill.batch_tokens": "batch_tokens",
    "prefill.batch_requests": "batch_requests",
    "prefill.chunk_multiple": "chunk_multiple",
    "tiers.edges": "tier_edges",
    "tiers.engines": "tier_engines",
    "tiers.quota_seconds": "tier_quota",
    "tiers.round_seconds": "tier_round_ticks",
    "decode.nextn": "nextn",
    "decode.record_tokens": "token_times",
    "decode.acceptance": "acceptance",
    "decode.prompt_interval": "prompt_interval",
    "decode.prompt_any_interval": "prompt_any_interval",
    "decode.prompt_usage_limit": "prompt_usage_limit",
    "policy.prefill": "prefill_policy",
    "policy.decode": "decode_policy",
    "policy.parameters": ALWAYS,  # one by one, below
    "failures.events": "incidents",
    "failures.gpu_per_hour": ALWAYS,
    "failures.host_per_hour": ALWAYS,
    "failures.storage_per_hour": Rule(
        lambda s, c: s.failures.storage_nodes > 0, "there are no storage nodes: set storage_nodes"
    ),
    "failures.until_seconds": Rule(_rates, "no part has a rate: set one, or unset it"),
    "failures.restart_seconds": _CRASH,
    "failures.retry_limit": _CRASH,
    "failures.repair_seconds": Rule(
        _failing("gpu"), "no GPU fails: add a rate or an event, or unset it"
    ),
    "failures.storage_nodes": Rule(
        lambda s, c: _failing("storage")(s, c) or c.storage_reads,
        "no storage node fails or takes time: add a rate, an event or storage.read_seconds, or unset it",
    ),
    "failures.storage_repair_seconds": Rule(
        _failing("storage"), "no storage node fails: add a rate or an event, or unset it"
    ),
    "scaling.prompt": "scale_prompt",
    "scaling.completion": "scale_decode",
    "scaling.round_seconds": "scale_round_ticks",
    "scaling.start_seconds": "start_ticks",
    "scaling.grace_seconds": "grace_ticks",
    "scaling.hold_above": "hold_above",
}
"""Per setting the option of the cluster that it becomes, or its own rule. Costs are read always."""


def settings(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the settings that differ from their defaults."""
    for name in changed(section):
        value, inner = getattr(section, name), f"{path}{name}"
        if dataclasses.is_dataclass(value) and inner not in SETTINGS:
            yield from settings(value, f"{inner}.")
        else:
            yield inner, value


def unused(service: ServiceConfig, cluster: ClusterConfig) -> Iterator[str]:
    """What to say of settings that nothing would read in the cluster they become."""
    for path, value in settings(service):
        kind = SETTINGS[path] if path in SETTINGS or not path.startswith("cost.") else ALWAYS
        rule = kind if isinstance(kind, Rule) else OPTIONS[kind]
        read = rule.read(service, cluster) if isinstance(rule, Rule) else rule.read(cluster)
        if not read:
            yield f"{path}={value!r} is set, but {_in_settings(rule.otherwise)}"
    for name in unread_parameters(cluster):
        yield (
            f"policy.parameters.{name} is set, but neither {cluster.prefill_policy!r} nor "
            f"{cluster.decode_policy!r} reads it: leave it out"
        )


def _in_settings(text: str) -> str:
    """A remedy that names options of the cluster, in the names of settings."""
    names = {v: k for k, v in SETTINGS.items() if isinstance(v, str) and v != "modes"}
    names |= {"kv_blocks": "memory.kv", "block_bytes": "memory.block_bytes"}
    names = {name: path for name, path in names.items() if "_" in name or name in ("swa", "nextn")}
    return re.sub(r"(?<![\w.])(" + "|".join(names) + r")\b", lambda m: names[m[1]], text)
