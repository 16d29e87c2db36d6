"""Float time decides as integer time does, and its derivatives are the differences of runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator import loop
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode, Status
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.simulate import compiler_options
from deepinfer_jax.simulator.trajectory import trajectory
from tests.simulator.oracle.hand import workload
from tests.simulator.reuse import Reusable

COST = StepCost(
    prefill_base=3_000_000_017,
    prefill_token=10_000_019,
    prefill_pair=1_013,
    prefill_context=503,
    prefill_exchange_base=1_000_000_007,
    prefill_exchange_token=300_007,
    decode_forms=[[9_000_000_011, 40_000_003, 21_001], [5_000_000_039, 90_000_049, 30_011]],
    decode_exchange_base=700_000_001,
    decode_exchange_row=2_000_003,
)
P, C, N, X = Mode.PROMPT, Mode.COMPLETION, Mode.NORMAL, Mode.MIXED
DECISIONS = [
    "status",
    "prefill_engine",
    "decode_engine",
    "decode_rank",
    "preemptions",
    "output_tokens",
    "block_hit_tokens",
    "compute_hit_tokens",
]
TIMES = [
    "matched",
    "pulled",
    "fetched",
    "prefill_start",
    "first_token",
    "handed_off",
    "decode_start",
    "finish",
]


def load(seed, count, mean_gap):
    """Poisson arrivals of prompts that share a hundred prefixes of 4 to 16 blocks of 128."""
    dice = np.random.default_rng(seed)
    arrival = np.cumsum(dice.exponential(mean_gap, count)).astype(np.int64)
    shared = dice.integers(4, 17, 100)
    group = dice.integers(0, 100, count)
    own = dice.integers(0, 12, count)
    blocks = shared[group] + own
    nodes = [(0, 0, int(n)) for n in shared]
    nodes += [(int(g) + 1, int(shared[g]), int(b)) for g, b in zip(group, blocks, strict=True)]
    prompts = 128 * blocks + dice.integers(0, 128, count)
    leaf = np.where(own > 0, 101 + np.arange(count), group + 1)
    fits = 128 * blocks + 134 <= prompts
    match = np.where(fits, leaf, group + 1)
    return workload(arrival, prompts, dice.integers(1, 200, count), nodes, match, leaf)


CLUSTERS = [
    ClusterConfig(modes=(N, N, X, X), ranks=2, slots=5, cost=COST, batch_tokens=1_024),
    ClusterConfig(
        modes=(P, P, P, C, C),
        ranks=2,
        slots=16,
        kv_blocks=90,
        cost=COST,
        match_ticks=1_000,
        cache_scope="shared",
        cache_blocks=900,
        fetch_link="fifo",
        fetch_ticks=2_000,
        fetch_femtoseconds_per_byte=31,
        block_bytes=100_003,
        write_back_ticks=5_000,
        step_quota=30_000_000_000,
        handoff_link="fifo",
        handoff_femtoseconds_per_byte=17,
        nextn=2,
        acceptance=(0.8, 0.5),
    ),
    ClusterConfig(
        modes=(X, X, X),
        slots=8,
        kv_blocks=60,
        cost=COST,
        cache_scope="local",
        cache_blocks=500,
        prefill_policy="dynamo_cost",
        batch_tokens=512,
        nextn=1,
        acceptance=(0.7,),
    ),
]


@pytest.mark.parametrize(
    "cluster",
    [
        CLUSTERS[0],
        pytest.param(CLUSTERS[1], marks=pytest.mark.slow),
        pytest.param(CLUSTERS[2], marks=pytest.mark.slow),
    ],
)
def test_both_time_types_take_the_same_decisions(cluster):
    requests = load(5, 400, 10_000)
    exact, real = (
        Reusable(cluster, requests, exact=kind).run(cluster, requests).requests
        for kind in (True, False)
    )
    assert exact.finish.dtype == np.int64 and real.finish.dtype == np.float64
    for name in DECISIONS:
        assert np.array_equal(getattr(exact, name), getattr(real, name)), name
    for name in TIMES:
        ticks, reals = getattr(exact, name), getattr(real, name)
        assert np.array_equal(np.argsort(ticks, kind="stable"), np.argsort(reals, kind="stable"))
        # A tick is lost or won where a step ends, a fetch or a transfer rounds, never more at once.
        assert np.max(np.abs(ticks - reals)) < 20, name
    busy = exact.finish.max()
    assert busy > 10**6 and len(set(exact.prefill_engine)) > 1


def test_an_engine_that_served_all_is_empty_in_float_time():
    """The last prompt is above the cap: it enters an empty engine only."""
    requests = workload([0, 0, 0, 10_000], [100, 333, 267, 5_000], [1] * 4)
    cost = dataclasses.replace(COST, prefill_token=1_234_567)
    cluster = ClusterConfig(modes=(X,), slots=8, cost=cost, tier_quota=(1_000,))
    run = Reusable(cluster, requests, exact=False).run(cluster, requests)
    assert run.requests.status.tolist() == [Status.COMPLETED] * 4


def light(count, gap):
    dice = np.random.default_rng(3)
    arrival = np.cumsum(dice.exponential(gap, count)).astype(np.int64)
    return workload(arrival, dice.integers(100, 2_000, count), dice.integers(1, 20, count))


class Sensitivity:
    """Mean TTFT of one compiled cluster as a function of `prefill_token`, in ticks."""

    def __init__(self, cluster, requests):
        self.requests = dataclasses.replace(requests, arrival=requests.arrival.astype(float))
        self.cluster = cluster
        with jax.enable_x64(True):
            self.shape, self.scenario = split(cluster, requests, exact=False)
            both = lambda x, dx, load: jax.jvp(lambda x: self.run(x, load), (x,), (dx,))  # noqa: E731
            options = compiler_options() | {"xla_backend_optimization_level": 0}
            self.compiled = jax.jit(both, compiler_options=options)

    def run(self, token, load):
        cost = dataclasses.replace(self.scenario.cost, prefill_token=token)
        scenario = dataclasses.replace(self.scenario, cost=cost)
        made = trajectory(self.shape, load, loop.run(self.shape, scenario, load)).requests
        ttft = jnp.mean(made.first_token - load.arrival)
        choices = made.prefill_engine * 1.0, jnp.argsort(made.prefill_start) * 1.0
        return ttft, choices

    def at(self, token, load=None):
        """(mean TTFT, its derivative, engines and order of the prefills)."""
        load = self.requests if load is None else load
        with jax.enable_x64(True):
            (ttft, choices), (slope, _) = self.compiled(float(token), 1.0, load)
        return float(ttft), float(slope), np.asarray(choices)


def test_derivative_of_ttft():
    """Common random numbers: the same requests on both sides, and the same decisions."""
    cluster = ClusterConfig(
        modes=(N, N), slots=8, cost=COST, prefill_policy="least_loaded", batch_requests=1
    )
    requests = light(80, 30_000)
    model = Sensitivity(cluster, requests)
    token, step = COST.prefill_token, 10.0
    _, slope, choices = model.at(token)
    above, _, after = model.at(token + step)
    below, _, before = model.at(token - step)
    assert np.array_equal(choices, after) and np.array_equal(choices, before)
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)

    # Requests wait for each other here, so a token costs more than its own time.
    own = requests.input_tokens.mean() / 10**6
    assert slope > 1.05 * own
    alone = dataclasses.replace(
        model.requests, arrival=10.0**9 * (1 + np.arange(80)), output_tokens=requests.output_tokens
    )
    assert model.at(token, alone)[1] == pytest.approx(own, rel=1e-9)
