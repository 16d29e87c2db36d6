"""A sweep is its single runs, on one device and on two."""

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.simulate import sweep
from tests.simulator.oracle.hand import cost, workload
from tests.simulator.reuse import Reusable

ROOT = pathlib.Path(__file__).parents[2]
REQUESTS = 60


def load(seed):
    dice = np.random.default_rng(seed)
    arrival = np.sort(dice.integers(0, 6_000, REQUESTS))
    return workload(arrival, dice.integers(1, 400, REQUESTS), dice.integers(1, 30, REQUESTS))


def scenarios():
    """(clusters [4], workloads [4]) of one shape; every number that may vary does."""
    first = ClusterConfig(modes=(Mode.MIXED,), slots=3, cost=cost(), batch_tokens=64)
    slower = cost(prefill_token=3 * 10**6, prefill_pair=7, decode_forms=[[10**7, 10**6, 999]])
    clusters = [
        first,
        dataclasses.replace(first, cost=slower, match_ticks=40),
        dataclasses.replace(first, batch_requests=1, chunk_multiple=16, max_input_tokens=350),
        dataclasses.replace(first, tier_quota=(1,), step_quota=10**7, modes=(Mode.MIXED,)),
    ]
    return clusters, [load(seed) for seed in (1, 2, 3, 1)]


def everything(run):
    """All times, choices and counts of a run."""
    return dataclasses.asdict(dataclasses.replace(run, requests=vars(run.requests)))


def numbers(made):
    """Its arrays by name; a part the cluster lacks is absent."""
    requests = {k: v for k, v in made.pop("requests").items() if k != "statuses"}
    return {k: v for k, v in (made | requests).items() if v is not None}


def reduced(run):
    return numbers(everything(run))


def in_subprocess(devices):
    """`sweep` on that many virtual devices of another process."""
    code = (
        "import sys, pickle, jax; from tests.simulator import sweep_test as t;"
        f"assert len(jax.devices()) == {devices};"
        "made = t.sweep(*t.scenarios(), t.reduced, devices=jax.devices());"
        "pickle.dump(made, sys.stdout.buffer)"
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert not done.returncode, done.stderr.decode()
    return pickle.loads(done.stdout)


@pytest.fixture(scope="module")
def singles():
    clusters, loads = scenarios()
    service = Reusable(clusters[0], loads[0])
    return [reduced(service.run(*pair)) for pair in zip(clusters, loads, strict=True)]


def same(made, singles):
    finishes = set()
    for k, single in enumerate(singles):
        assert set(made) == set(single)
        for name, value in single.items():
            assert np.array_equal(made[name][k], value), (k, name)
        finishes.add(tuple(single["finish"]))
    assert len(finishes) == len(singles), "the scenarios must differ"


def test_a_sweep_equals_single_runs(singles):
    same(sweep(*scenarios(), reduced), singles)


def test_two_devices_equal_one(singles):
    same(in_subprocess(2), singles)
