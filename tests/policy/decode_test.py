"""Decode policies against plain loops and the example in which the two load rules differ."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import decode, registry
from deepinfer_jax.policy.view import DecodeView, PolicyParameters, RequestView

J = 6


def request(context_tokens=0, **values) -> RequestView:
    fields = {f.name: 0 for f in dataclasses.fields(RequestView)}
    return RequestView(**(fields | {"context_tokens": context_tokens} | values))


def first_best(ranks, key):
    return min(ranks, key=lambda j: (key(j), j), default=J)


def plain_two_load(v, r, p, ranks):
    short = r.context_tokens < p.short_below
    return first_best(ranks, lambda j: v.requests[j] if short else v.tokens[j])


def plain_dualpath_z(v, r, p, ranks):
    if not ranks:
        return J
    members = {g: [j for j in range(J) if v.eligible[j] and v.group[j] == g] for g in v.group}
    totals = {g: sum(v.tokens[j] for j in js) for g, js in members.items()}
    group = v.group[first_best(ranks, lambda j: totals[v.group[j]])]
    inside = [j for j in ranks if v.group[j] == group]
    z = Fraction(str(p.dualpath_slack)) * (r.context_tokens + totals[group]) / len(members[group])
    under = [j for j in inside if v.tokens[j] + r.context_tokens <= z]
    if under:
        return first_best(under, lambda j: v.requests[j])
    return first_best(inside, lambda j: v.tokens[j])


PLAIN = {
    "two_load": plain_two_load,
    "dualpath_z": plain_dualpath_z,
    "round_robin": lambda v, r, p, js: js[r.decisions % len(js)] if js else J,
    "random": lambda v, r, p, js: js[r.draw % len(js)] if js else J,
    "least_requests": lambda v, r, p, js: first_best(js, lambda j: v.requests[j]),
    "least_tokens": lambda v, r, p, js: first_best(js, lambda j: v.tokens[j]),
}


def test_every_policy_has_a_plain_twin():
    assert set(PLAIN) == set(registry.names("decode"))


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), top=st.sampled_from([1, 4, 10**6]))
def test_equals_plain_loops(name, seed, top):
    rng = np.random.default_rng(seed)
    v = DecodeView(
        eligible=rng.random(J) < 0.7,
        room=rng.random(J) < rng.choice([0.0, 0.5, 1.0]),
        requests=rng.integers(0, 5, J),
        tokens=rng.integers(0, top + 1, J),
        group=np.sort(rng.integers(0, 3, J)),
    )
    plain = DecodeView(
        v.eligible.tolist(),
        v.room.tolist(),
        v.requests.tolist(),
        v.tokens.tolist(),
        v.group.tolist(),
    )
    r = RequestView(*rng.integers(0, top + 1, 7).tolist())
    p = PolicyParameters(short_below=top // 2, dualpath_slack=float(rng.choice([1.0, 1.05])))
    up = [j for j in range(J) if plain.eligible[j]]
    ranks = [j for j in up if plain.room[j]] or up
    assert registry.resolve("decode", name)(v, r, p) == PLAIN[name](plain, r, p, ranks)


def test_two_load_and_dualpath_differ():
    """Concurrency [1, 10], held [100K, 20K], 1K tokens: Z = 63.5K forbids rank 0 to one only."""
    yes = np.ones(2, bool)
    v = DecodeView(yes, yes, np.array([1, 10]), np.array([100_000, 20_000]), np.zeros(2, int))
    assert decode.two_load(v, request(1000), PolicyParameters()) == 0
    assert decode.dualpath_z(v, request(1000), PolicyParameters()) == 1
    assert decode.two_load(v, request(4096), PolicyParameters()) == 1  # long: smallest KV
    assert decode.two_load(v, request(4095), PolicyParameters()) == 0


def test_dualpath_z_edge_is_inclusive():
    """Held [10, 12] with 10 tokens more: rank 1, of lower concurrency, wins once Z reaches 22."""
    yes = np.ones(2, bool)
    v = DecodeView(yes, yes, np.array([5, 4]), np.array([10, 12]), np.zeros(2, int))
    # Z = 16 * slack: rank 0 (20 tokens after) is under it from 1.25, rank 1 (22) from 1.375.
    for slack, expected in ((1.249999, 0), (1.25, 0), (1.374999, 0), (1.375, 1)):
        parameters = PolicyParameters(dualpath_slack=slack)
        assert decode.dualpath_z(v, request(10), parameters) == expected


def test_without_room_the_request_waits_at_an_eligible_rank():
    v = DecodeView(
        eligible=np.array([False, True, True]),
        room=np.array([True, False, False]),
        requests=np.array([0, 7, 6]),
        tokens=np.array([0, 10, 20]),
        group=np.array([0, 0, 1]),
    )
    assert decode.two_load(v, request(1), PolicyParameters()) == 2
    assert decode.least_tokens(v, request(1), PolicyParameters()) == 1
    assert decode.candidates(v).tolist() == [False, True, True]
