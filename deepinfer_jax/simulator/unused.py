"""Settings that the chosen topology would silently ignore: each is an error, not a surprise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator.plain_config import changed
from deepinfer_jax.simulator.service import Links, RooflineCost, ServiceConfig


def unused(service: ServiceConfig) -> Iterator[str]:
    """Settings that differ from their defaults although nothing would read them."""
    s, e, names = service, service.engines, changed
    swa = {"swa_ttl_seconds", "swa_anchors"}
    votes = {"prompt_interval", "prompt_any_interval", "prompt_usage_limit"}
    scaled = {"round_seconds", "start_seconds", "hold_above"}
    own_policy = ":" in s.policy.prefill
    rules = (
        ("cache", set(names(s.cache)) - {"match_seconds"}, s.cache.scope != "none",
         "cache.scope='none' has no cache: choose 'shared' or 'local', or leave it out"),
        ("cache", swa & set(names(s.cache)), s.cache.swa, "cache.swa is off: turn it on"),
        ("links", _links("fetch") & set(names(s.links)), s.cache.scope == "shared",
         f"cache.scope={s.cache.scope!r} never fetches: choose 'shared', or leave it out"),
        ("links", _links("state") & set(names(s.links)), s.cache.swa and s.cache.scope == "shared",
         "no sliding-window state moves: use cache.scope='shared' and cache.swa=True"),
        ("links", _links("handoff") & set(names(s.links)), e.prompt > 0,
         "there is no prompt engine to hand anything over: add one, or leave it out"),
        ("tiers", set(names(s.tiers)), s.policy.prefill == "pull" or own_policy,
         f"policy.prefill={s.policy.prefill!r} has no tiers: use 'pull', or leave it out"),
        ("decode", votes & set(names(s.decode)), e.normal > 0,
         "only normal engines vote: add one, or leave it out"),
        ("decode", {"acceptance"} & set(names(s.decode)), s.decode.nextn > 0,
         "decode.nextn=0 drafts nothing: set it, or leave it out"),
        ("policy", {"decode"} & set(names(s.policy)), e.completion > 0,
         "without completion engines decode placement is given: leave it out"),
        ("failures", {"until_seconds"} & set(names(s.failures)), _rates(s),
         "no part has a rate: set one, or leave it out"),
        ("scaling", scaled & set(names(s.scaling)), s.scaling.prompt or s.scaling.completion,
         "no pool is scaled: describe scaling.prompt or scaling.completion, or leave it out"),
        ("memory", {"kv_blocks"} & set(names(s.memory)), s.memory.kv == "blocks",
         f"memory.kv={s.memory.kv!r}: use 'blocks', or leave it out"),
        ("memory", {"hbm_share", "reserved_gib"} & set(names(s.memory)), s.memory.kv == "hbm",
         f"memory.kv={s.memory.kv!r}: use 'hbm', or leave it out"),
    )  # fmt: skip
    for section, set_here, read, remedy in rules:
        if set_here and not read:
            first = sorted(set_here)[0]
            value = getattr(getattr(s, section), first)
            yield f"{section}.{first}={value!r} is set, but {remedy}"
    roofline = isinstance(s.cost, RooflineCost)
    shared = s.cache.scope == "shared"
    links_from = [shared and s.links.fetch_bytes_per_second is None]
    links_from += [shared and s.cache.swa and s.links.state_bytes_per_second is None]
    links_from += [e.prompt > 0 and s.links.handoff_bytes_per_second is None]
    if s.hardware and not (roofline or s.memory.kv == "hbm" or any(links_from)):
        yield (
            f"hardware={s.hardware!r} is set, but step times, KV blocks and link speeds are all "
            "given explicitly: leave it out"
        )
    yield from _unread_parameters(s)


def _rates(service: ServiceConfig) -> bool:
    f = service.failures
    return any((f.gpu_per_hour, f.host_per_hour, f.storage_per_hour))


def _links(prefix: str) -> set[str]:
    return {f.name for f in dataclasses.fields(Links) if f.name.startswith(prefix)}


def _unread_parameters(service: ServiceConfig) -> Iterator[str]:
    """Parameters that neither of two registered policies looks at."""
    policy = service.policy
    chosen = [("prefill", policy.prefill), ("decode", policy.decode)]
    if any(":" in name for _, name in chosen):
        return
    read = {
        word for kind, name in chosen for word in registry.resolve(kind, name).__code__.co_names
    }
    known = {field.name for field in dataclasses.fields(PolicyParameters)}
    for name in policy.parameters:
        if name in known and name not in read:
            yield (
                f"policy.parameters.{name} is set, but neither {policy.prefill!r} nor "
                f"{policy.decode!r} reads it: leave it out"
            )
