"""Random incidents and scaling for random small clusters of a few topologies, each topology one program."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Incident, Mode, Pool
from deepinfer_jax.simulator.options import only_read
from deepinfer_jax.simulator.workload import Workload
from tests.simulator.oracle import generate
from tests.simulator.oracle.prompts import Dice, random_requests, workload_of

P, C, N, X = Mode.PROMPT, Mode.COMPLETION, Mode.NORMAL, Mode.MIXED
BLOCK = 4
INCIDENTS = 15
LATE = FOREVER - 1
"""An incident that no run lives to see; it keeps the program of a topology the same."""

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "split": {
        "modes": (P, P, C, C, C),
        "ranks": 2,
        "slots": 2,
        "kv_blocks": 30,
        "cache_scope": "shared",
        "swa": True,
        "storage_nodes": 14,
        "nextn": 2,
        "acceptance": (0.7, 0.5),
        "handoff_link": "fifo",
        "fetch_ticks": 3,
        "scale_prompt": True,
        "scale_decode": True,
        "token_times": True,
        "cache_blocks": 40,
        "tier_edges": (20,),
        "tier_quota": (FOREVER, FOREVER),
    },
    "co-located": {
        "modes": (N, N, X, X),
        "ranks": 2,
        "slots": 3,
        "kv_blocks": 30,
        "cache_scope": "local",
        "swa": True,
        "prefill_policy": "least_loaded",
        "cache_blocks": 60,
        "write_back_ticks": 2,
        "token_times": True,
    },
    "plain": {
        "modes": (P, C, P, C),
        "ranks": 3,
        "slots": 2,
        "decode_policy": "dualpath_z",
        "handoff_link": "unlimited",
        "scale_decode": True,
    },
    "all": {
        "modes": (P, P, C, C, N, X),
        "ranks": 1,
        "slots": 3,
        "kv_blocks": 25,
        "cache_scope": "local",
        "prefill_policy": "cache_aware",
        "cache_blocks": 50,
        "decode_policy": "least_tokens",
    },
}


def random_incidents(dice: Dice, fixed: dict[str, Any], horizon: int) -> tuple[Any, ...]:
    """Some that happen, of every kind the topology has; the others never do."""
    engines, ranks = len(fixed["modes"]), fixed["ranks"]
    counts = {
        Incident.GPU: engines * ranks,
        Incident.HOST: engines,
        Incident.DEPART: engines,
        Incident.STORAGE: fixed.get("storage_nodes", 0),
    }
    kinds = [kind for kind, count in counts.items() if count]
    if counts[Incident.STORAGE] and dice.chance(0.5):
        kinds += [Incident.STORAGE] * 9
    moments = [dice.between(0, horizon) for _ in range(3)]
    some = [
        (
            dice.one_of(*moments, dice.between(0, horizon)),
            int(kind),
            dice.between(0, counts[kind] - 1),
        )
        for kind in (dice.one_of(*kinds) for _ in range(dice.between(0, INCIDENTS - 3)))
    ]
    late = [(LATE, int(Incident.GPU), 0), (LATE, int(Incident.DEPART), 0)]
    if counts[Incident.STORAGE]:
        late += [(LATE, int(Incident.STORAGE), 0)]
    late += [(LATE, int(Incident.HOST), 0)] * (INCIDENTS - len(late) - len(some))
    return tuple(sorted(some, key=lambda x: x[0]) + late)


def random_pool(dice: Dice, engines: int, capacity: int, fewest: int) -> Pool:
    """Limits that bind, now and then."""
    initial = dice.between(fewest, engines)
    minimum = dice.between(0, initial)
    return Pool(
        initial=initial,
        minimum=minimum,
        maximum=dice.between(initial, engines),
        capacity=dice.between(1, capacity),
        spare=dice.one_of(0, 0, 1),
        step_up=dice.between(1, 2),
        step_down=dice.between(0, 2),
    )


def case(topology: str, seed: int, requests: int = 24) -> tuple[ClusterConfig, Workload]:
    """A cluster and a workload whose program depends on the topology alone."""
    dice = Dice(seed)
    fixed = dict(TOPOLOGIES[topology])
    planned = fitting(dice, requests, fixed.get("kv_blocks") or 99)
    horizon = max(p.arrival for p in planned) + dice.one_of(50, 500, 3_000)
    modes = fixed["modes"]
    counts = {mode: sum(m == mode for m in modes) for mode in (P, C)}
    for name, mode, capacity in (("scale_prompt", P, 60), ("scale_decode", C, 6)):
        if fixed.get(name):
            fewest = 2 if mode == P and fixed.get("tier_edges") else 1
            fixed[name] = random_pool(dice, counts[mode], capacity, fewest)
    if fixed.get("scale_decode"):
        fixed["scale_round_ticks"] = dice.one_of(30, 200, 1_000)
        fixed["start_ticks"] = dice.between(0, 300)
        fixed["hold_above"] = dice.one_of(0.8, 0.5)
    if C in modes:
        fixed["grace_ticks"] = dice.one_of(0, 0, dice.between(1, 60), dice.between(100, 1_000))
    if fixed.get("storage_nodes"):
        fixed["storage_repair_ticks"] = dice.between(500, 5_000)
    if fixed.get("tier_edges"):
        fixed["tier_round_ticks"] = dice.one_of(50, 700)
        fixed["tier_quota"] = tuple(dice.one_of(FOREVER, dice.between(1, 200)) for _ in range(2))
    cluster = ClusterConfig(
        cost=cost(dice),
        block_tokens=BLOCK,
        reserve=3,
        incidents=random_incidents(dice, fixed, horizon),
        restart_ticks=dice.one_of(0, dice.between(1, 50), dice.between(100, 2_000)),
        repair_ticks=dice.one_of(0, dice.between(1, 2_000), FOREVER),
        retry_limit=dice.between(0, 3),
        match_ticks=dice.one_of(0, 1, 20),
        handoff_ticks=dice.one_of(0, 30, 200),
        handoff_femtoseconds_per_byte=dice.one_of(0, 10_000),
        live_bytes=dice.one_of(0, 400),
        block_bytes=200,
        batch_tokens=dice.one_of(16, FOREVER),
        chunk_multiple=dice.one_of(1, 4),
        seed=dice.between(0, 2**31),
        **fixed,
    )
    return only_read(cluster), padded(workload_of(planned), 6 * requests)


def cost(dice: Dice) -> Any:
    """Two decode forms, always."""
    made = generate.random_cost(dice)
    forms = [*made.decode_forms, *made.decode_forms][:2]
    return dataclasses.replace(made, decode_forms=forms)


def fitting(dice: Dice, requests: int, kv_blocks: int) -> list[Any]:
    """Exactly so many random requests, most of which fit."""
    made: list[Any] = []
    while len(made) < requests:
        made = [
            p
            for p in random_requests(dice, BLOCK, 3)
            if p.input_tokens <= BLOCK * kv_blocks and p.output_tokens <= 12
        ][:requests]
    return made


def padded(load: Workload, nodes: int) -> Workload:
    """Segments that nobody uses fill the trie up to `nodes`."""
    missing = nodes - len(load.node_parent)
    assert missing >= 0
    grown = {
        name: np.append(getattr(load, name), np.full(missing, 0, np.int32))
        for name in ("node_parent", "node_start", "node_end")
    }
    return dataclasses.replace(load, **grown)
