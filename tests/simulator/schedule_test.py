"""Failures by rate are exponential, fixed by seed and part alone; pools come in units per round."""

import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.simulator.cluster import Incident, Pool
from deepinfer_jax.simulator.plain_config import merged
from deepinfer_jax.simulator.schedule import incidents
from deepinfer_jax.simulator.service import Failures, service
from deepinfer_jax.simulator.translate import translate
from tests.simulator.service_test import SPLIT

COUNTS = {Incident.GPU: 40, Incident.HOST: 5, Incident.STORAGE: 20}


def test_gaps_are_exponential():
    rates = Failures(gpu_per_hour=2.0, until_seconds=100 * 3600.0)
    made = incidents(rates, COUNTS, seed=1)
    assert list(made) == sorted(made) and made[-1][0] < 100 * 3600 * 10**9
    gaps = []
    for gpu in range(40):
        ticks = [0] + [tick for tick, kind, index in made if (kind, index) == (0, gpu)]
        gaps += list(np.diff(ticks) / 3600e9)
    assert len(gaps) == pytest.approx(8000, abs=4 * 8000**0.5)
    # Gaps that end before 100 h: cutting the last one off moves the mean by less than a percent.
    assert stats.kstest(gaps, stats.expon(scale=0.5).cdf).pvalue > 0.001


def test_a_part_fails_when_it_fails_whatever_else_is_set():
    alone = incidents(Failures(gpu_per_hour=1.0, until_seconds=36_000.0), COUNTS, seed=7)
    more = incidents(
        Failures(
            events=((5.0, "depart", 1),),
            gpu_per_hour=1.0,
            host_per_hour=3.0,
            storage_per_hour=0.1,
            until_seconds=36_000.0,
        ),
        COUNTS | {Incident.GPU: 80},
        seed=7,
    )
    assert set(alone) < set(more)
    assert {kind for _, kind, _ in more} == {0, 1, 2, 3}
    assert (5 * 10**9, 3, 1) in more
    assert incidents(Failures(gpu_per_hour=1.0, until_seconds=36_000.0), COUNTS, seed=8) != alone


def test_a_service_with_failures_and_pools():
    values = merged(
        SPLIT,
        {
            "failures": {"events": ((1.5, "host", 2),), "restart_seconds": 180.0},
            "scaling": {
                "prompt": {"initial": 1, "maximum": 2, "capacity": 1000.0, "spare": 1},
                "round_seconds": 30.0,
                "start_seconds": 120.0,
            },
        },
    )
    made = translate(service(values), seed=3).cluster
    assert made.incidents == ((1_500_000_000, 1, 2),) and made.restart_ticks == 180 * 10**9
    assert made.scale_prompt == Pool(initial=1, maximum=2, capacity=30_000, spare=1)
    assert made.scale_decode is None and made.grace_ticks == 60 * 10**9
    assert made.serving_at_first == (True, False, True)
