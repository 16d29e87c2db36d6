"""The retention study: its rates against a replay of single blocks, its differences against arithmetic."""

import numpy as np
import pytest

from deepinfer_jax.simulator.conversations import CHAT, DAY_SECONDS, Conversations
from deepinfer_jax.simulator.workload import workload
from experiments import retention
from experiments.settings import load, resolve_config

DAY = DAY_SECONDS * 10**9


def replay(trace, ttl, sweep=3600 * 10**9, block=128, reserve=134):
    """Tokens that each request hits where blocks expire and requests take no time."""
    expiry, hits, swept = {}, [], 0
    whole = {
        trace.session[q]: trace.blocks(q).tolist() for q in range(len(trace))
    }  # its last turn's
    for q in range(len(trace)):
        now, ids = int(trace.arrival[q]), trace.blocks(q).tolist()
        if now // sweep > swept:
            swept = now // sweep
            expiry = {i: e for i, e in expiry.items() if e > swept * sweep}
        most = max(0, int(trace.input_tokens[q]) - reserve) // block
        found = next((k for k, i in enumerate(ids[:most]) if i not in expiry), most)
        hits.append(block * found)
        answered = int(trace.input_tokens[q] + trace.output_tokens[q]) // block
        for i in [*ids, *whole[trace.session[q]][len(ids) : answered]]:
            expiry[i] = max(expiry.get(i, 0), now + ttl[trace.traffic[q]])
    return np.asarray(hits)


def test_the_last_week_of_a_run_is_that_of_a_replay_of_blocks():
    p = resolve_config(load("configs/retention.py:smoke"))
    values = {**p["workload"], **p["cases"]["two_days_away"]}
    trace = Conversations(**values).trace(0)
    study = retention.Study(p, {0: workload(trace)})
    late = trace.arrival >= trace.arrival[-1] - 7 * DAY
    for days in (7.0, 3.0, 1.0):
        row = study.run(workload(trace), days)
        hits = replay(trace, (round(days * DAY), 3 * DAY))
        assert row["requests"] == late.sum()
        assert row["tokens hit"] == pytest.approx(
            hits[late].sum() / trace.input_tokens[late].sum(), abs=2e-4
        )
        chat = late & (trace.traffic == CHAT)
        assert row["chat tokens hit"] == pytest.approx(
            hits[chat].sum() / trace.input_tokens[chat].sum(), abs=2e-4
        )
        assert row["tokens to compute"] == pytest.approx(
            (trace.input_tokens - hits)[late].sum(), rel=2e-3
        )


def test_points_and_relative_losses_are_different_numbers():
    long = {"tokens hit": 0.8, "chat tokens hit": 0.5, "requests hit": 1.0}
    short = {"tokens hit": 0.76, "chat tokens hit": 0.4, "requests hit": 1.0}
    long |= {"tokens to compute": 200, "blocks held": 10}
    short |= {"tokens to compute": 240, "blocks held": 5}
    found = retention.compared(long, short)
    assert found["tokens hit, points"] == pytest.approx(-4)
    assert found["tokens hit, relative"] == pytest.approx(-0.05)
    assert found["chat tokens hit, relative"] == pytest.approx(-0.2)
    assert found["tokens to compute, relative"] == pytest.approx(0.2)
    assert found["blocks held, relative"] == -0.5
    # Four points at 80 % hit are a fifth more tokens to compute, whatever they are called.
    points, relative = retention.readings(0.8, 0.04)
    assert points["tokens to compute"] == pytest.approx(0.2)
    assert relative["points"] == pytest.approx(0.032)
