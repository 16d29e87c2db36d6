"""Prefill policies against plain loops, published examples and exact fractions."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import prefill, registry
from deepinfer_jax.policy.view import PolicyParameters, PrefillView, RequestView

M = 4


def view(**arrays) -> PrefillView:
    size = len(next(iter(arrays.values())))
    fields = {f.name: np.zeros(size, np.int64) for f in dataclasses.fields(PrefillView)}
    fields["eligible"] = np.ones(size, bool)
    return PrefillView(**(fields | {k: np.asarray(v) for k, v in arrays.items()}))


def request(**values) -> RequestView:
    fields = {f.name: 0 for f in dataclasses.fields(RequestView)}
    return RequestView(**(fields | values))


def choose(name, v, r=None, **parameters):
    return int(registry.resolve("prefill", name)(v, r or request(), PolicyParameters(**parameters)))


# The same rules once more, as loops over engines with exact fractions.


def first_best(engines, key):
    return min(engines, key=lambda e: (key(e), e), default=M)


def plain_pull(v, r, p, engines):
    if not engines:
        return M
    e = max(engines, key=lambda e: (v.quota_cap[e] - v.quota_used[e], -e))
    return e if v.quota_used[e] == 0 or v.quota_used[e] + v.hit_cost[e] <= v.quota_cap[e] else M


def plain_cache_aware(v, r, p, engines):
    load = [a + b for a, b in zip(v.requests, v.decode_requests, strict=True)]
    used = [load[e] for e in engines]
    rel = Fraction(str(p.balance_rel))
    if used and max(used) - min(used) > p.balance_abs and max(used) > rel * min(used):
        return first_best(engines, lambda e: load[e])
    hit = max((v.hit_tokens[e] for e in engines), default=0)
    if hit > Fraction(str(p.cache_threshold)) * r.input_tokens:
        return first_best(engines, lambda e: (-v.hit_tokens[e], load[e]))
    return first_best(engines, lambda e: (v.cached_tokens[e], load[e]))


def plain_dynamo(v, r, p, engines):
    def cost(e):
        blocks = Fraction(r.input_tokens - v.hit_tokens[e] + v.tokens[e], p.block_tokens)
        return Fraction(str(p.overlap_weight)) * blocks + v.decode_blocks[e]

    return first_best(engines, cost)


def plain_mooncake(v, r, p, engines):
    best = max((v.hit_tokens[e] for e in engines), default=0)
    best_cost = min((v.hit_cost[e] for e in engines), default=0)

    def ttft(e):
        own = v.hit_tokens[e]
        if own and Fraction(best, own) < Fraction(str(p.balancing_threshold)):
            return v.quota_used[e] + v.hit_cost[e]
        return v.quota_used[e] + (best - own) * p.transfer_ticks_per_token + best_cost

    return first_best(engines, ttft)


def plain_dualpath(v, r, p, engines):
    light = [e for e in engines if v.tokens[e] <= p.token_beta]
    short = [e for e in light if v.reading_tokens[e] <= p.reading_alpha]
    return first_best(short or light, lambda e: v.tokens[e])


PLAIN = {
    "pull": plain_pull,
    "least_quota": lambda v, r, p, es: first_best(es, lambda e: v.quota_used[e]),
    "round_robin": lambda v, r, p, es: es[r.decisions % len(es)] if es else M,
    "random": lambda v, r, p, es: es[r.draw % len(es)] if es else M,
    "least_loaded": lambda v, r, p, es: first_best(
        es, lambda e: (v.requests[e] + v.decode_requests[e], v.tokens[e])
    ),
    "least_tokens": lambda v, r, p, es: first_best(es, lambda e: v.tokens[e]),
    "local_affinity": lambda v, r, p, es: first_best(
        es, lambda e: (-v.hit_tokens[e], v.quota_used[e])
    ),
    "affinity_with_recompute": lambda v, r, p, es: first_best(
        es, lambda e: v.quota_used[e] + v.hit_cost[e]
    ),
    "cache_aware": plain_cache_aware,
    "dynamo_cost": plain_dynamo,
    "mooncake": plain_mooncake,
    "dualpath": plain_dualpath,
}


def test_every_policy_has_a_plain_twin():
    assert set(PLAIN) == set(registry.names("prefill"))


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), top=st.sampled_from([1, 4, 300, 10**6]))
def test_equals_plain_loops(name, seed, top):
    rng = np.random.default_rng(seed)
    fields = {f.name: rng.integers(0, top + 1, M) for f in dataclasses.fields(PrefillView)}
    fields["eligible"] = rng.random(M) < 0.7
    v = PrefillView(**fields)
    plain_view = PrefillView(**{k: x.tolist() for k, x in fields.items()})
    r = RequestView(*rng.integers(0, 2 * top + 1, 7).tolist())
    p = PolicyParameters(
        reading_alpha=top // 2,
        token_beta=top * 3 // 4,
        balance_abs=int(rng.integers(0, top // 2 + 1)),
        cache_threshold=float(rng.choice([0.3, 0.5])),
        overlap_weight=float(rng.choice([0.5, 1.0, 1.3])),
        balancing_threshold=float(rng.choice([1.2, 2.0])),
        transfer_ticks_per_token=int(rng.integers(0, 3)),
    )
    engines = [e for e in range(M) if plain_view.eligible[e]]
    assert registry.resolve("prefill", name)(v, r, p) == PLAIN[name](plain_view, r, p, engines)


def test_dynamo_documentation_example():
    """Costs 8+10, 5+5, 2+9 blocks: the second worker wins, not the third with the longest hit."""
    input_tokens = 1280
    v = view(hit_tokens=[1280 - 8 * 128, 1280 - 5 * 128, 1280 - 2 * 128], decode_blocks=[10, 5, 9])
    assert choose("dynamo_cost", v, request(input_tokens=input_tokens)) == 1
    assert choose("dynamo_cost", v, request(input_tokens=input_tokens), overlap_weight=3.0) == 2


def test_cache_aware_defaults_of_the_public_routers():
    """0.3 / 64 / 1.5: both imbalance conditions are needed, and a match counts above 30 %."""
    r = request(input_tokens=1000)
    hit = [0, 301]
    assert choose("cache_aware", view(requests=[0, 64], hit_tokens=hit), r) == 1  # difference 64
    assert choose("cache_aware", view(requests=[0, 65], hit_tokens=hit), r) == 0
    assert choose("cache_aware", view(requests=[130, 195], hit_tokens=hit), r) == 1  # ratio 1.5
    assert choose("cache_aware", view(requests=[130, 196], hit_tokens=hit), r) == 0
    small = view(requests=[0, 5], hit_tokens=[0, 300], cached_tokens=[9, 2])
    assert choose("cache_aware", small, r) == 1  # no match: the smaller cache
    unknown = dataclasses.replace(small, cached_tokens=0)
    assert choose("cache_aware", unknown, r) == 0  # sizes unknown: the load


def test_affinity_waits_or_recomputes():
    """A holder busy for 10 loses to an idle engine whose recomputation takes 8, not one of 14."""
    v = view(quota_used=[10, 0], hit_tokens=[768, 0], hit_cost=[2, 8])
    assert choose("local_affinity", v) == 0
    assert choose("affinity_with_recompute", v) == 1
    v = view(quota_used=[10, 0], hit_tokens=[768, 0], hit_cost=[2, 14])
    assert choose("affinity_with_recompute", v) == 0
    assert choose("local_affinity", view(quota_used=[3, 1])) == 1  # no hit anywhere


def test_mooncake_fetches_only_past_the_threshold():
    """Own hit 600 of 1000 is near (1.67 < 2): it recomputes; 400 is far: it fetches 600 tokens."""
    v = view(quota_used=[50, 0], hit_tokens=[1000, 600], hit_cost=[10, 58])
    assert choose("mooncake", v, transfer_ticks_per_token=0) == 1
    v = view(quota_used=[50, 0], hit_tokens=[1000, 400], hit_cost=[10, 10**6])
    assert choose("mooncake", v, transfer_ticks_per_token=0) == 1  # 10 against 60
    assert choose("mooncake", v, transfer_ticks_per_token=1) == 0  # 610 against 60


def test_dualpath_classes():
    v = view(tokens=[5, 3, 9, 1], reading_tokens=[1, 9, 0, 9])
    assert choose("dualpath", v, reading_alpha=2, token_beta=8) == 0  # the only short one
    assert choose("dualpath", v, reading_alpha=9, token_beta=8) == 3
    assert choose("dualpath", v, reading_alpha=0, token_beta=8) == 3  # short one is overloaded
    assert choose("dualpath", v, reading_alpha=9, token_beta=0) == 4  # all overloaded: wait


def test_pull_takes_over_cap_requests_only_when_empty():
    cost = {"hit_cost": [12, 12]}
    assert choose("pull", view(quota_used=[1, 0], quota_cap=[10, 10], **cost)) == 1
    assert choose("pull", view(quota_used=[1, 1], quota_cap=[10, 10], **cost)) == 2
    assert choose("pull", view(quota_used=[4, 3], quota_cap=[15, 15], **cost)) == 1  # just fits
    assert choose("pull", view(quota_used=[4, 4], quota_cap=[15, 15], **cost)) == 2


def test_tier_edges_belong_to_the_upper_tier():
    context = np.array([0, 16_383, 16_384, 65_535, 65_536, 262_143, 262_144, 10**6])
    expected = [0, 0, 1, 1, 2, 2, 3, 3]
    assert prefill.tier(context).tolist() == expected
    assert jax.jit(prefill.tier)(jnp.asarray(context)).tolist() == expected
    assert prefill.tier(5, ()) == 0
    assert [int(prefill.tier(x, (10,))) for x in (9, 10)] == [0, 1]


def test_least_quota_rank():
    assert prefill.least_quota_rank(np.array([3, 1, 2, 1])) == 1
    assert jax.jit(prefill.least_quota_rank)(jnp.array([3, 1, 2, 1])) == 1


def plain_shares(demand, engines):
    """Largest remainder in exact fractions, small tiers first set to one."""
    tiers = range(len(demand))
    if not any(demand):
        demand = [1] * len(demand)
    wanted = [t for t in tiers if demand[t]]
    if engines < len(wanted):
        top = sorted(wanted, key=lambda t: (-demand[t], t))[:engines]
        return [int(t in top) for t in tiers]
    rest, left = list(wanted), engines
    while small := [
        t for t in rest if Fraction(demand[t] * left, sum(demand[t] for t in rest)) < 1
    ]:
        left -= len(small)
        rest = [t for t in rest if t not in small]
    total = sum(demand[t] for t in rest)
    share = {t: Fraction(demand[t] * left, total) for t in rest}
    out = [int(share[t]) if t in share else int(t in wanted) for t in tiers]
    spare = engines - sum(out)
    for t in sorted(rest, key=lambda t: (int(share[t]) - share[t], t))[:spare]:
        out[t] += 1
    return out


@settings(max_examples=400, deadline=None)
@given(
    demand=st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 100), st.integers(0, 2**48)),
        min_size=4,
        max_size=4,
    ),
    engines=st.one_of(st.integers(0, 9), st.integers(0, 2000)),
)
def test_tier_shares(demand, engines):
    shares = prefill.tier_shares(np.array(demand), engines)
    assert shares.tolist() == plain_shares(demand, engines)
    assert shares.sum() == engines
    if engines >= sum(d > 0 for d in demand):
        assert all(s >= 1 for s, d in zip(shares, demand, strict=True) if d)
    if any(demand):
        assert all(s == 0 for s, d in zip(shares, demand, strict=True) if not d)
    with jax.enable_x64(True):
        assert SHARES(jnp.asarray(demand), engines).tolist() == shares.tolist()


SHARES = jax.jit(prefill.tier_shares)


def test_tier_shares_by_hand():
    assert prefill.tier_shares(np.array([100, 1, 0, 0]), 4).tolist() == [3, 1, 0, 0]
    assert prefill.tier_shares(np.array([90, 10]), 10).tolist() == [9, 1]
    assert prefill.tier_shares(np.array([5, 5, 5]), 4).tolist() == [2, 1, 1]
    assert prefill.tier_shares(np.array([3, 9, 1, 2]), 2).tolist() == [1, 1, 0, 0]
    assert prefill.tier_shares(np.array([0, 0, 0, 0]), 6).tolist() == [2, 2, 1, 1]
