"""Every registered policy: numpy and jit agree, and nothing but an eligible entry is chosen."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import DecodeView, PolicyParameters, PrefillView, RequestView

MAY_REFUSE = {"pull", "dualpath"}
JITTED = {
    (kind, name): jax.jit(registry.resolve(kind, name))
    for kind in registry.POLICIES
    for name in registry.names(kind)
}

SMALL = st.integers(0, 4)  # many ties
TOKENS = st.one_of(SMALL, st.integers(0, 10**6))
TICKS = st.one_of(SMALL, st.integers(0, 2**50))
PARAMETERS = st.builds(
    PolicyParameters,
    short_below=TOKENS,
    dualpath_slack=st.sampled_from([1.0, 1.05, 1.2]),
    reading_alpha=TOKENS,
    token_beta=TOKENS,
    cache_threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    balance_abs=st.integers(0, 3),
    balance_rel=st.sampled_from([1.0, 1.5, 2.0]),
    overlap_weight=st.sampled_from([0.0, 0.7, 1.0, 2.5]),
    balancing_threshold=st.sampled_from([1.0, 1.5, 2.0]),
    transfer_ticks_per_token=SMALL,
)
REQUESTS = st.builds(
    RequestView,
    index=SMALL,
    decisions=st.integers(0, 2**40),
    draw=st.integers(0, 2**31 - 1),
    input_tokens=TOKENS,
    context_tokens=TOKENS,
    cost=TICKS,
    shared_hit_tokens=TOKENS,
)


def array(element: st.SearchStrategy, size: int, dtype: type) -> st.SearchStrategy:
    return st.lists(element, min_size=size, max_size=size).map(lambda x: np.array(x, dtype))


def prefill_views(size: int, time: type) -> st.SearchStrategy:
    fields = {f.name: array(TOKENS, size, np.int64) for f in dataclasses.fields(PrefillView)}
    ticks = {n: array(TICKS, size, time) for n in ("quota_used", "quota_cap", "hit_cost")}
    eligible = array(st.booleans(), size, np.bool_)
    return st.builds(PrefillView, **(fields | ticks | {"eligible": eligible}))


def decode_views(size: int) -> st.SearchStrategy:
    return st.builds(
        DecodeView,
        eligible=array(st.booleans(), size, np.bool_),
        room=array(st.booleans(), size, np.bool_),
        requests=array(SMALL, size, np.int64),
        tokens=array(TOKENS, size, np.int64),
        group=array(st.integers(0, size - 1), size, np.int64),
    )


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def check(kind, view, request, parameters):
    size = len(view.eligible)
    with jax.enable_x64(True):
        arguments = on_device((view, request, parameters))
        jitted = {name: int(JITTED[kind, name](*arguments)) for name in registry.names(kind)}
    for name in registry.names(kind):
        host = registry.resolve(kind, name)(view, request, parameters)
        assert not isinstance(host, jax.Array), name
        assert host == jitted[name], name
        assert host == size or view.eligible[host], name
        if not view.eligible.any():
            assert host == size, name
        elif name not in MAY_REFUSE:
            assert host < size, name
        if kind == "decode" and (view.eligible & view.room).any():
            assert view.room[host], name


@pytest.mark.parametrize("time", [np.int64, np.float64])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_prefill(time, data):
    view = data.draw(prefill_views(data.draw(st.sampled_from([1, 5])), time))
    check("prefill", view, data.draw(REQUESTS), data.draw(PARAMETERS))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_decode(data):
    view = data.draw(decode_views(data.draw(st.sampled_from([1, 6]))))
    check("decode", view, data.draw(REQUESTS), data.draw(PARAMETERS))


@pytest.mark.parametrize(("kind", "name"), list(JITTED))
def test_vmap_is_one_decision_per_lane(kind, name):
    """A batch of views decides as each view alone: no policy looks at its neighbours."""
    rng = np.random.default_rng(7)
    cls = PrefillView if kind == "prefill" else DecodeView
    fields = {f.name: rng.integers(0, 5, (8, 5)) for f in dataclasses.fields(cls)}
    fields |= {n: rng.integers(0, 2, (8, 5)) > 0 for n in ("eligible", "room") if n in fields}
    view = cls(**fields)
    request = RequestView(*rng.integers(0, 5, 7).tolist())
    policy = registry.resolve(kind, name)
    with jax.enable_x64(True):
        decide = jax.vmap(lambda v: policy(v, request, PolicyParameters()))
        together = jax.jit(decide)(on_device(view))
    for lane in range(8):
        one = jax.tree.map(operator.itemgetter(lane), view)
        alone = policy(one, request, PolicyParameters())
        assert alone == int(together[lane])
