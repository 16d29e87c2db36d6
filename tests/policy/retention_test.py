"""Retention: TTLs, watermarks, and who is deleted when age and pressure disagree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import retention

DAY = 86_400


def test_ttl_of_agents_and_chats():
    age = np.array([3 * DAY - 1, 3 * DAY, 7 * DAY - 1, 7 * DAY])
    assert retention.expired(-age, 0, retention.AGENT_TTL_SECONDS).tolist() == [False] + [True] * 3
    assert retention.expired(-age, 0, retention.CHATBOT_TTL_SECONDS).tolist() == [False] * 3 + [
        True
    ]


def test_watermarks():
    assert [int(retention.reclaim_amount(u, 90, 80)) for u in (0, 89, 90, 91, 100)] == [
        *(0, 0, 0),
        *(11, 20),
    ]


def test_precedence_where_ttls_differ():
    """An agent entry of 4 days has expired; a chat entry of 6 days is older but alive."""
    last_use, ttl = np.array([-4, -6, -1]), np.array([3, 7, 7])
    size, evictable = np.array([10, 10, 10]), np.ones(3, bool)
    arguments = (last_use, size, evictable, 0, ttl, 10)
    assert retention.victims(*arguments, "age_first").tolist() == [True, False, False]
    assert retention.victims(*arguments, "pressure_first").tolist() == [True, True, False]
    # Under class_first the chat of one day goes before the two of a more precious class.
    traffic = np.array([0, 0, 1])
    late = (last_use, size, evictable, 0, np.array([9, 9, 9]), 10, "class_first", traffic)
    assert retention.victims(*late).tolist() == [False, False, True]
    with pytest.raises(ValueError, match="class_first or pressure_first"):
        retention.victims(*arguments, "oldest")
    with pytest.raises(ValueError, match="traffic is missing"):
        retention.victims(*arguments, "class_first")


def plain_victims(last_use, size, evictable, now, ttl, amount, precedence, traffic):
    entries = [k for k in range(len(size)) if evictable[k]]
    aged = {k for k in entries if now - last_use[k] >= ttl[k]}
    gone = set() if precedence == "pressure_first" else set(aged)
    freed = sum(size[k] for k in gone)
    if precedence != "class_first":
        traffic = [0] * len(size)
    for k in sorted(entries, key=lambda k: (-traffic[k], last_use[k], k)):
        if freed >= amount:
            break
        if k not in gone:
            gone.add(k)
            freed += size[k]
    return gone | aged


@pytest.mark.parametrize("precedence", retention.PRECEDENCES)
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), amount=st.integers(0, 40))
def test_equals_a_walk_over_entries(precedence, seed, amount):
    rng = np.random.default_rng(seed)
    last_use, size = rng.integers(0, 12, 8), rng.integers(0, 9, 8)
    evictable, ttl = rng.random(8) < 0.8, rng.choice([3, 7], 8)
    arguments = (last_use, size, evictable, 12, ttl, amount)
    traffic = rng.integers(0, 3, 8)
    mask = retention.victims(*arguments, precedence, traffic)
    plain = (np.asarray(a).tolist() for a in arguments)
    expected = plain_victims(*plain, precedence, traffic.tolist())
    assert set(np.flatnonzero(mask)) == expected
    jitted = JITTED[precedence](*map(jnp.asarray, (*arguments, traffic)))
    assert np.asarray(jitted).tolist() == mask.tolist()


JITTED = {
    p: jax.jit(lambda *a, p=p: retention.victims(*a[:-1], p, a[-1])) for p in retention.PRECEDENCES
}
