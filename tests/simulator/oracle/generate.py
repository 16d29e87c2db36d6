"""Random small clusters and workloads, each from one seed, made to provoke ties and limits."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator.cluster import ANCHORS, FOREVER, LINKS, ClusterConfig, Mode
from deepinfer_jax.simulator.options import only_read
from deepinfer_jax.simulator.workload import Workload
from tests.simulator.oracle.prompts import Dice, Planned, random_requests, workload_of

PREFILL_POLICIES = (
    "pull",
    "least_quota",
    "round_robin",
    "random",
    "least_loaded",
    "pull",
    "least_tokens",
    "local_affinity",
    "affinity_with_recompute",
    "cache_aware",
    "dynamo_cost",
    "mooncake",
    "pull",
    "dualpath",
)
DECODE_POLICIES = (
    "two_load",
    "dualpath_z",
    "round_robin",
    "random",
    "least_requests",
    "least_tokens",
)
TICK = 10**6


def case(seed: int) -> tuple[ClusterConfig, Workload]:
    """One cluster and its workload.

    Policies rotate with the seed, so that any 14 successive seeds visit all of them.
    """
    dice = Dice(seed)
    block = dice.one_of(4, 5, 8, 16)
    reserve = dice.one_of(1, 3, block, block + 3)
    requests = random_requests(dice, block, reserve)
    cluster = random_cluster(dice, block, reserve, requests, seed)
    return cluster, workload_of(requests)


def random_cluster(
    dice: Dice, block: int, reserve: int, requests: list[Planned], seed: int
) -> ClusterConfig:
    """Every field that the cluster reads."""
    modes = random_modes(dice)
    cost = random_cost(dice)
    nextn = dice.one_of(0, 0, 0, 1, 2, 3)
    fields = {
        "modes": modes,
        "ranks": dice.between(1, 3),
        "slots": dice.between(1, 4),
        "kv_blocks": random_kv_blocks(dice, block, requests, nextn),
        "block_tokens": block,
        "max_input_tokens": dice.some(0.1, 3 * block, 10 * block, FOREVER),
        "cost": cost,
        "match_ticks": dice.one_of(0, 0, 1, 3, 50),
        "nextn": nextn,
        "acceptance": tuple(dice.one_of(0.0, 1.0, 0.5, 0.8, 0.37) for _ in range(nextn)),
        "prompt_interval": dice.between(1, 6),
        "prompt_any_interval": dice.between(1, 9),
        "prompt_usage_limit": dice.one_of((9, 10), (1, 2)),
        "decode_policy": DECODE_POLICIES[seed % len(DECODE_POLICIES)],
        "prefill_policy": PREFILL_POLICIES[seed % len(PREFILL_POLICIES)],
        "policy": random_parameters(dice, block),
        "seed": dice.one_of(0, dice.between(0, 2**31), dice.between(0, 2**62)),
    }
    fields |= random_cache(dice, reserve, len(requests), len(modes))
    if fields["prefill_policy"] == "pull":
        fields |= random_tiers(dice, block, sum(m != Mode.COMPLETION for m in modes))
    fields |= random_batches(dice, block, cost)
    fields |= random_links(dice, fields["cache_scope"])
    return only_read(ClusterConfig(**fields))


def random_modes(dice: Dice) -> tuple[Mode, ...]:
    """One to five engines; PROMPT and COMPLETION only together."""
    kind = dice.between(0, 4)
    modes: list[Mode] = []
    if kind <= 1 or kind == 4:
        modes += [Mode.PROMPT] * dice.between(1, 2) + [Mode.COMPLETION] * dice.between(1, 2)
    if kind == 2:
        modes += [Mode.NORMAL] * dice.between(1, 3)
    if kind == 3:
        modes += [Mode.MIXED] * dice.between(1, 3)
    if kind == 4 or dice.chance(0.15):
        modes += [dice.one_of(Mode.NORMAL, Mode.MIXED)]
    return tuple(dice.order(modes))


def random_cost(dice: Dice) -> StepCost:
    """Steps of a few ticks to some thousands, in whole ticks or with remainders; none under one."""
    unit = dice.one_of(TICK, 1, 333_333)
    scale = dice.one_of(1, 10, 100)

    def amount(ticks: float) -> int:
        return round(ticks * scale * TICK * dice.generator.random()) // unit * unit

    def perhaps(ticks: float) -> int:
        return dice.one_of(0, amount(ticks))

    forms = [[2 * TICK + amount(10), amount(3), perhaps(0.3)]]
    forms += [[amount(12), amount(6), amount(0.5)] for _ in range(dice.between(0, 2))]
    return StepCost(
        prefill_base=2 * TICK + amount(10),
        prefill_token=amount(2),
        prefill_pair=perhaps(0.1),
        prefill_context=perhaps(0.2),
        prefill_exchange_base=perhaps(3),
        prefill_exchange_token=perhaps(0.3),
        decode_forms=forms,
        decode_exchange_base=perhaps(3),
        decode_exchange_row=perhaps(1),
    )


def random_kv_blocks(dice: Dice, block: int, requests: list[Planned], nextn: int) -> int | None:
    """No limit, or room for about one to three of the longest requests."""
    longest = max(-(-(p.input_tokens + p.output_tokens + nextn) // block) for p in requests)
    if dice.chance(0.25):
        return None
    if dice.chance(0.1):
        return max(1, longest - dice.between(1, 2))
    return longest + dice.one_of(0, 0, 1, 2, dice.between(0, longest))


def random_parameters(dice: Dice, block: int) -> dict[str, Any]:
    """Policy parameters small enough to matter here."""
    return {
        "short_below": dice.between(1, 12 * block),
        "dualpath_slack": dice.one_of(1.05, 0.8, 1.25),
        "reading_alpha": dice.between(0, 6 * block),
        "token_beta": dice.between(0, 20 * block),
        "cache_threshold": dice.one_of(0.0, 0.1, 0.3, 0.5),
        "balance_abs": dice.between(0, 4),
        "balance_rel": dice.one_of(1.0, 1.5, 2.0),
        "overlap_weight": dice.one_of(0.5, 1.0, 2.0),
        "block_tokens": block,
        "balancing_threshold": dice.one_of(1.0, 1.5, 2.0, 4.0),
        "transfer_ticks_per_token": dice.some(0.7, 1, 20),
    }


def random_cache(dice: Dice, reserve: int, requests: int, engines: int) -> dict[str, Any]:
    """Scope, capacity, write-back, anchors and warm prompts."""
    scope = dice.one_of("none", "shared", "shared", "shared", "local", "local")
    if scope == "none":
        return {"cache_scope": scope, "reserve": reserve}
    warm = dice.order(list(range(requests)))[: dice.some(0.3, 1, 5)]
    return {
        "cache_scope": scope,
        "reserve": reserve,
        "cache_blocks": dice.some(0.6, 1, 30, FOREVER),
        "write_back_ticks": dice.some(0.4, 1, 500),
        "publish_output": dice.chance(0.5),
        "swa": dice.chance(0.7),
        "swa_ttl_ticks": dice.one_of(FOREVER, dice.between(1, 1_000), dice.between(100, 20_000)),
        "swa_anchors": dice.one_of(*ANCHORS),
        "warm_requests": tuple(warm),
        "warm_engine": dice.between(0, engines - 1),
    }


def random_tiers(dice: Dice, block: int, takers: int) -> dict[str, Any]:
    """One to three tiers, caps that bind, rounds; rarely a tier without any engine."""
    tiers = dice.between(1, min(3, takers))
    edges = sorted({dice.between(1, 10 * block) for _ in range(tiers - 1)})
    tiers = len(edges) + 1
    dealt: tuple[int, ...] = ()
    if dice.chance(0.4):
        counts = [1] * tiers
        if dice.chance(0.2):
            counts[dice.between(0, tiers - 1)] = 0
        while sum(counts) < takers:
            counts[dice.between(0, tiers - 1)] += 1
        dealt = tuple(counts)
    quota = [dice.some(0.7, 1, dice.one_of(10, 300, 5_000), FOREVER) for _ in range(tiers)]
    return {
        "tier_edges": tuple(edges),
        "tier_engines": dealt,
        "tier_quota": tuple(quota),
        "tier_round_ticks": dice.some(0.6, 1, dice.one_of(50, 3_000), FOREVER),
    }


def random_batches(dice: Dice, block: int, cost: StepCost) -> dict[str, Any]:
    """Limits of a prefill batch."""
    work = cost.prefill_base + cost.prefill_token * dice.between(1, 8 * block)
    return {
        "step_quota": work if dice.chance(0.5) else FOREVER,
        "batch_tokens": dice.some(0.5, 1, 8 * block, FOREVER),
        "batch_requests": dice.some(0.4, 1, 3, FOREVER),
        "chunk_multiple": dice.one_of(1, 4, block, 2 * block, FOREVER),
    }


def random_links(dice: Dice, scope: str) -> dict[str, Any]:
    """Sizes, rates and delays of fetches and hand-offs."""
    rate = TICK // 100
    fields = {
        "handoff_link": dice.one_of(*LINKS),
        "handoff_ticks": dice.some(0.5, 1, 100),
        "handoff_femtoseconds_per_byte": dice.some(0.6, 1, rate),
        "live_bytes": dice.some(0.5, 1, 500),
        "block_bytes": dice.some(0.8, 1, 500),
    }
    if scope == "shared":
        fields |= {
            "fetch_link": dice.one_of(*LINKS),
            "fetch_ticks": dice.some(0.5, 1, dice.one_of(100, 2_000)),
            "fetch_femtoseconds_per_byte": dice.some(0.6, 1, rate),
            "swa_femtoseconds_per_byte": dice.some(0.6, 1, rate),
            "swa_bytes": dice.some(0.7, 1, 500),
        }
    return fields
