"""The jitted simulator and the readable model agree on every event, to the tick.

`SEMANTICS.md` is implemented twice, without shared code; random small clusters cover every policy,
mode and feature. A hundred and forty more cases are in the slow set.
"""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.simulator.simulate import prepare
from deepinfer_jax.simulator.tokens import token_times
from deepinfer_jax.timeline import EVENTS
from tests.simulator.oracle import generate, service

QUICK = (2, 9, 13)  # five engines and a shared cache, NORMAL, bounded caches
REST = (
    "status",
    "block_hit_tokens",
    "compute_hit_tokens",
    "prefill_engine",
    "decode_engine",
    "decode_rank",
    "preemptions",
)
COUNTERS = (
    "fetched_bytes",
    "swa_bytes",
    "handoff_bytes",
    "blocks_published",
    "blocks_evicted",
    "blocks_present",
)


def agree(seed: int) -> None:
    cluster, load = generate.case(seed)
    expected = service.run(cluster, load)
    cluster = dataclasses.replace(cluster, token_times=seed % 2 == 0)
    made, _ = prepare(cluster, load, options={"xla_backend_optimization_level": 0}).run()
    decoded = np.asarray(expected.decode_start) >= 0
    for name in (*EVENTS[1:], *REST):
        ours, theirs = np.asarray(getattr(made.requests, name)), np.asarray(getattr(expected, name))
        if name in ("decode_engine", "decode_rank"):
            ours, theirs = ours[decoded], theirs[decoded]
        np.testing.assert_array_equal(ours, theirs, err_msg=f"case {seed}: {name}")
    np.testing.assert_array_equal(made.emitted, expected.emitted)
    if cluster.token_times:
        ticks, splits = token_times(made, cluster)
        assert [x.tolist() for x in np.split(ticks, splits[1:-1])] == expected.tokens
    np.testing.assert_array_equal(made.busy.sum(axis=1), expected.busy)
    for name in COUNTERS:
        assert int(getattr(made, name)) == getattr(expected, name), (seed, name)


@pytest.mark.parametrize("seed", QUICK)
def test_every_event_agrees(seed: int) -> None:
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(140))
def test_every_event_agrees_on_more_cases(seed: int) -> None:
    agree(seed)
