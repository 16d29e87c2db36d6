"""When each option of a cluster is read, so that one that nothing reads is an error, not a surprise.

One entry per field of `ClusterConfig`. What decides are modes, scopes, policies and switches, and
whether anything is described that could move (bytes). Other numbers at their limit, such as a rate
of 0, do not make an option unread: a sweep may pass through them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepinfer_jax.policy import prefill, registry
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Incident, Mode


@dataclasses.dataclass(frozen=True)
class Option:
    """`read(cluster)` says whether anything reads the option; `otherwise` why not, and the remedy."""

    read: Callable[[ClusterConfig], bool]
    otherwise: str


def _words(c: ClusterConfig, kind: str) -> frozenset[str] | None:
    """Names that the placement policy in use looks at; None for one's own, which may read anything."""
    name = c.prefill_policy if kind == "prefill" else c.decode_policy
    if kind == "decode" and Mode.PROMPT not in c.modes:
        return frozenset()
    if ":" in name:
        return None
    known = prefill.pull if name == "pull" else registry.resolve(kind, name)
    return frozenset(known.__code__.co_names)


def _policy_reads(c: ClusterConfig, word: str) -> bool:
    words = [_words(c, kind) for kind in ("prefill", "decode")]
    return any(seen is None or word in seen for seen in words)


def _fetched(c: ClusterConfig) -> bool:
    """Whether blocks travel from a store to engines."""
    return c.cache_scope == "shared" and c.block_bytes > 0


def _fetched_state(c: ClusterConfig) -> bool:
    return c.cache_scope == "shared" and c.swa and c.swa_bytes > 0


def _happens(c: ClusterConfig, *kinds: Incident) -> bool:
    return any(kind in kinds for _, kind, _ in c.incidents)


def _graced(c: ClusterConfig) -> bool:
    """Whether a COMPLETION engine may leave as planned."""
    planned = [i for _, kind, i in c.incidents if kind == Incident.DEPART]
    named = any(c.modes[i] == Mode.COMPLETION for i in planned if i < c.engines)
    return named or c.scale_decode is not None


def _watermark(c: ClusterConfig) -> bool:
    return c.cache_scope != "none" and c.retention and c.retention_high_blocks < FOREVER


def _blocks_matter(c: ClusterConfig) -> bool:
    moved = Mode.PROMPT in c.modes and c.block_bytes > 0
    limited = c.kv_blocks is not None
    return c.cache_scope != "none" or limited or moved or _policy_reads(c, "decode_blocks")


def _each(
    names: str, read: Callable[[ClusterConfig], bool] = lambda c: True, otherwise: str = ""
) -> dict[str, Option]:
    return dict.fromkeys(names.split(), Option(read, otherwise))


OPTIONS: Mapping[str, Option] = {
    **_each(
        "modes ranks slots kv_blocks max_input_tokens cost match_ticks cache_scope prefill_policy "
        "step_quota batch_tokens batch_requests chunk_multiple nextn incidents token_times policy"
    ),
    **_each(
        "cache_blocks reserve write_back_ticks publish_output swa warm_requests retention_sweep_ticks",
        lambda c: c.cache_scope != "none",
        "cache_scope='none' has no cache; choose 'shared' or 'local', or unset it",
    ),
    **_each(
        "swa_ttl_ticks swa_anchors",
        lambda c: c.cache_scope != "none" and c.swa,
        "no sliding-window states are kept; use a cache with swa=True, or unset it",
    ),
    **_each(
        "warm_engine",
        lambda c: bool(c.warm_requests) and (c.cache_scope == "local" or c.swa),
        "no engine holds warm prompts; set warm_requests in a local cache or one with swa, or unset it",
    ),
    **_each(
        "retention_ttl_ticks retention_high_blocks",
        lambda c: c.cache_scope != "none" and c.retention,
        "nothing ever sweeps; set retention_sweep_ticks, or unset it",
    ),
    **_each(
        "retention_low_blocks retention_precedence",
        _watermark,
        "no sweep looks at a watermark; set retention_high_blocks, or unset it",
    ),
    **_each(
        "block_tokens",
        _blocks_matter,
        "nothing is counted in blocks; use a cache, kv_blocks or block_bytes of a hand-off, or unset it",
    ),
    **_each(
        "block_bytes",
        lambda c: c.cache_scope == "shared" or Mode.PROMPT in c.modes,
        "no blocks move; use cache_scope='shared' or PROMPT engines, or unset it",
    ),
    **_each(
        "fetch_link",
        lambda c: c.cache_scope == "shared",
        "only cache_scope='shared' fetches; choose it, or unset it",
    ),
    **_each(
        "fetch_ticks",
        lambda c: _fetched(c) or _fetched_state(c),
        "nothing is fetched; use cache_scope='shared' with block_bytes, or unset it",
    ),
    **_each(
        "fetch_femtoseconds_per_byte",
        _fetched,
        "no blocks are fetched; use cache_scope='shared' with block_bytes, or unset it",
    ),
    **_each(
        "swa_bytes",
        lambda c: c.cache_scope == "shared" and c.swa,
        "no sliding-window state moves; use cache_scope='shared' with swa=True, or unset it",
    ),
    **_each(
        "swa_femtoseconds_per_byte",
        _fetched_state,
        "no sliding-window state moves; use cache_scope='shared' with swa=True and swa_bytes, or unset it",
    ),
    **_each(
        "tier_edges",
        lambda c: c.prefill_policy == "pull",
        "only prefill_policy='pull' has tiers; choose it, or unset it",
    ),
    **_each(
        "tier_engines tier_round_ticks",
        lambda c: c.tiers > 1,
        "there is one tier; give tier_edges, or unset it",
    ),
    **_each(
        "tier_quota",
        lambda c: _policy_reads(c, "quota_cap"),
        "the prefill policy reads no cap; use 'pull', or unset it",
    ),
    **_each(
        "decode_policy handoff_link handoff_ticks live_bytes",
        lambda c: Mode.PROMPT in c.modes,
        "there is no PROMPT engine to hand anything over; add one, or unset it",
    ),
    **_each(
        "handoff_femtoseconds_per_byte",
        lambda c: Mode.PROMPT in c.modes and c.block_bytes + c.live_bytes > 0,
        "no bytes are handed over; use PROMPT engines with block_bytes or live_bytes, or unset it",
    ),
    **_each("acceptance", lambda c: c.nextn > 0, "nextn=0 drafts nothing; set nextn, or unset it"),
    **_each(
        "prompt_interval prompt_any_interval",
        lambda c: Mode.NORMAL in c.modes,
        "only NORMAL engines vote; add one, or unset it",
    ),
    **_each(
        "prompt_usage_limit",
        lambda c: Mode.NORMAL in c.modes and c.kv_blocks is not None,
        "no NORMAL engine has a limit of KV blocks; add one and set kv_blocks, or unset it",
    ),
    **_each(
        "restart_ticks retry_limit",
        lambda c: c.crashes,
        "no incident crashes an engine; add one, or unset it",
    ),
    **_each(
        "repair_ticks",
        lambda c: _happens(c, Incident.GPU),
        "no GPU fails; add such an incident, or unset it",
    ),
    **_each(
        "storage_nodes stripe_blocks",
        lambda c: c.cache_scope == "shared" and (_happens(c, Incident.STORAGE) or c.storage_reads),
        "no node of a shared store fails or takes time; use cache_scope='shared' with such an incident "
        "or storage_read_ticks, or unset it",
    ),
    **_each(
        "storage_repair_ticks",
        lambda c: c.cache_scope == "shared" and _happens(c, Incident.STORAGE),
        "no node of a shared store goes down; use cache_scope='shared' and such an incident, or unset it",
    ),
    **_each(
        "storage_read_ticks storage_femtoseconds_per_byte",
        lambda c: _fetched(c) and c.storage_nodes > 0,
        "no blocks are read from storage nodes; use storage_nodes and block_bytes, or unset it",
    ),
    **_each(
        "storage_asked",
        lambda c: c.storage_reads,
        "reads of storage nodes take no time; set storage_read_ticks, or unset it",
    ),
    **_each(
        "scale_prompt",
        lambda c: Mode.PROMPT in c.modes,
        "there is no PROMPT engine to scale; add one, or unset it",
    ),
    **_each(
        "scale_decode",
        lambda c: Mode.COMPLETION in c.modes,
        "there is no COMPLETION engine to scale; add one, or unset it",
    ),
    **_each(
        "scale_round_ticks start_ticks hold_above",
        lambda c: c.scaling,
        "no pool is scaled; set scale_prompt or scale_decode, or unset it",
    ),
    **_each(
        "grace_ticks",
        _graced,
        "no COMPLETION engine leaves as planned; scale them or add a DEPART incident, or unset it",
    ),
    **_each(
        "seed",
        lambda c: c.nextn > 0 or _policy_reads(c, "draw") or c.storage_reads,
        "nothing is drawn; set nextn, storage_read_ticks or a random policy, or unset it",
    ),
}


def default(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field; MISSING without one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def unread(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    """(name, reason and remedy) of options that are not at their default although nothing reads them."""
    for field in dataclasses.fields(cluster):
        option = OPTIONS[field.name]
        if not option.read(cluster) and getattr(cluster, field.name) != default(field):
            yield field.name, option.otherwise
    for name in unread_parameters(cluster):
        yield f"policy[{name!r}]", "neither placement policy reads it; unset it"


def unread_parameters(cluster: ClusterConfig) -> Iterator[str]:
    """Policy parameters that are given although neither policy in use looks at them."""
    known = {field.name for field in dataclasses.fields(PolicyParameters)}
    for name in cluster.policy:
        if name in known and not _policy_reads(cluster, name):
            yield name


def only_read(cluster: ClusterConfig) -> ClusterConfig:
    """`cluster` with every option that nothing reads back at its default."""
    defaults = {field.name: default(field) for field in dataclasses.fields(cluster)}
    dropped = list(unread_parameters(cluster))
    policy = {name: value for name, value in cluster.policy.items() if name not in dropped}
    cluster = dataclasses.replace(cluster, policy=policy)
    while names := [name for name, _ in unread(cluster)]:
        cluster = dataclasses.replace(cluster, **{name: defaults[name] for name in names})
    return cluster
