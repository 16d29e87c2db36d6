"""The scaling loop on a diurnal load: never below the minimum, never in above 0.8, limits per round."""

import numpy as np
import pytest

from deepinfer_jax.simulator.cluster import ClusterConfig, Mode, Pool
from deepinfer_jax.simulator.synthetic import LognormalLengths, synthetic
from deepinfer_jax.simulator.workload import workload
from tests.simulator.oracle.hand import TICK, cost
from tests.simulator.reuse import Reusable

SECOND = 10**9
PERIOD = 600  # seconds of a "day"
P, C = Mode.PROMPT, Mode.COMPLETION
PROMPT = Pool(initial=3, minimum=2, maximum=8, capacity=60_000, step_up=2, step_down=1)
DECODE = Pool(initial=2, minimum=1, maximum=5, capacity=40, step_up=1, step_down=1)
SERVICE = ClusterConfig(
    modes=(P,) * 8 + (C,) * 5,
    slots=64,
    cost=cost(prefill_token=TICK * 100_000, decode_forms=[[TICK * 40_000_000, TICK * 100_000, 0]]),
    scale_prompt=PROMPT,
    scale_decode=DECODE,
    scale_round_ticks=10 * SECOND,
    start_ticks=15 * SECOND,
    grace_ticks=5 * SECOND,
)


def load(seed):
    lengths = LognormalLengths(2_000, 0.8, 100, 0.6, 20_000, 1_000)
    shape = {"amplitude": 0.8, "period_seconds": PERIOD}
    return workload(
        synthetic("diurnal", requests=6_000, rate=10.0, lengths=lengths, seed=seed, **shape)
    )


@pytest.fixture(scope="module")
def runs():
    service = Reusable(SERVICE, load(1))
    spare = ClusterConfig(
        **{f: getattr(SERVICE, f) for f in SERVICE.__dataclass_fields__}
        | {"scale_prompt": Pool(**vars(PROMPT) | {"spare": 1})}
    )
    return [service.run(SERVICE, load(seed)) for seed in (1, 2)] + [service.run(spare, load(1))]


def rounds(run):
    """[(tick, current, demand, wanted) of the prompt pool, of the decode pool], each [n, 4]."""
    log = np.asarray(run.lives.scale_log)[: int(run.lives.scale_rounds)]
    return [log[:, [0, 1 + 3 * k, 2 + 3 * k, 3 + 3 * k]] for k in range(2)]


def test_the_limits_hold_in_every_round(runs):
    for run in runs:
        assert np.all(np.asarray(run.requests.status) == 0)
        for pool, log in zip((PROMPT, DECODE), rounds(run), strict=True):
            tick, current, demand, wanted = log.T
            assert np.array_equal(tick, 10 * SECOND * (1 + np.arange(len(tick))))
            assert wanted.min() >= pool.minimum and wanted.max() <= pool.maximum
            assert np.all(wanted - current <= pool.step_up)
            assert np.all(current - wanted <= pool.step_down)
            used = demand / (pool.capacity * current)
            shrinks = wanted < current
            assert shrinks.any() and np.all(used[shrinks] <= 0.8)
            held = (used > 0.8) & (demand <= pool.capacity * (current - 1))
            assert not np.any(shrinks & held)
            # What a round wants is what the next one finds.
            assert np.array_equal(current[1:], wanted[:-1])


def test_the_pool_follows_the_day(runs):
    """Engines in service peak after the load does, and cost less than the most there can be."""
    for run in runs:
        prompt = rounds(run)[0]
        assert prompt[:, 3].max() >= 6 and prompt[:, 3].min() <= 3
        day = (prompt[:, 0] / SECOND) % PERIOD
        high = prompt[(day > 150) & (day < 300), 3].mean()
        low = prompt[(day > 450) & (day < 600), 3].mean()
        assert high > 1.8 * low
        held = run.lives.life_ticks[:, 1:].sum(axis=1)
        assert held.sum() < 0.85 * run.end * len(held)
        assert np.all(held[:2] == run.end), "the minimum is never given back"


def test_spare_quota_is_held_on_top(runs):
    plain, _, spare = runs
    ours, theirs = rounds(plain)[0], rounds(spare)[0]
    assert theirs[:, 3].mean() > ours[:, 3].mean() + 0.5
    waits = [np.mean(run.requests.pulled - run.requests.arrival) for run in (plain, spare)]
    assert waits[1] <= waits[0]
