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
    with pytest.raises(ValueError, match="age_first or pressure_first"):
        retention.victims(*arguments, "oldest")


def plain_victims(last_use, size, evictable, now, ttl, amount, precedence):
    entries = [k for k in range(len(size)) if evictable[k]]
    aged = {k for k in entries if now - last_use[k] >= ttl[k]}
    gone = set(aged) if precedence == "age_first" else set()
    freed = sum(size[k] for k in gone)
    for k in sorted(entries, key=lambda k: (last_use[k], k)):
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
    mask = retention.victims(*arguments, precedence)
    expected = plain_victims(*(np.asarray(a).tolist() for a in arguments), precedence)
    assert set(np.flatnonzero(mask)) == expected
    jitted = JITTED[precedence](*map(jnp.asarray, arguments))
    assert np.asarray(jitted).tolist() == mask.tolist()


JITTED = {
    p: jax.jit(lambda *a, p=p: retention.victims(*a, precedence=p)) for p in retention.PRECEDENCES
}
