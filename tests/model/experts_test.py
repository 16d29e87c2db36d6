"""Routing and grouped experts against every expert computed for every token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.model import experts, parameters
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.presets import tiny

CONFIG = tiny()
D, E, K = CONFIG.hidden_size, CONFIG.num_experts, CONFIG.num_active_experts


@pytest.fixture(scope="module")
def params():
    tree = model_parameters(CONFIG)["layers"][0]["moe"]
    made = parameters.initialise(tree, jax.random.key(0))
    biases = {
        k: jax.random.normal(jax.random.key(i), (E,)) for i, k in enumerate(("bias", "bias_image"))
    }
    return made | biases


def expert(p, e, x):
    """One expert's output for x [D], in float64."""
    gate, up = np.split(np.float64(p["gate_up"][e]) @ x, 2)
    c = CONFIG.swiglu_limit
    gate, up = np.minimum(gate, c), np.clip(up, -c, c)
    return np.float64(p["down"][e]) @ (gate / (1 + np.exp(-gate)) * up)


def written_out(p, x, image):
    scores = np.sqrt(np.log1p(np.exp(np.float64(p["router"]) @ x)))
    bias = np.float64(p["bias_image"] if image else p["bias"])
    chosen = np.argsort(-(scores + bias), kind="stable")[:K]
    weight = scores[chosen] / scores[chosen].sum() * CONFIG.routed_scaling
    routed = sum(w * expert(p, e, x) for w, e in zip(weight, chosen, strict=True))
    gate, up = np.split(np.float64(p["shared_gate_up"]) @ x, 2)
    return routed + np.float64(p["shared_down"]) @ (gate / (1 + np.exp(-gate)) * up), chosen


moe = jax.jit(experts.moe, static_argnums=(1, 5))


def test_the_layer(params):
    x = jax.random.normal(jax.random.key(1), (2, 9, D))
    image = jnp.arange(18).reshape(2, 9) % 3 == 0
    valid = jnp.arange(9) < jnp.array([[9], [4]])
    y, visits = moe(params, CONFIG, x, valid, image, K)
    counted = np.zeros(E, int)
    for s, q in zip(*np.nonzero(valid), strict=True):
        expected, chosen = written_out(params, np.float64(x[s, q]), bool(image[s, q]))
        np.testing.assert_allclose(y[s, q], expected, atol=1e-5)
        counted[chosen] += 1
    np.testing.assert_array_equal(visits, counted)


def test_the_clamp_holds_for_routed_and_shared(params):
    x = 100 * jax.random.normal(jax.random.key(2), (1, 2, D))
    yes = jnp.ones((1, 2), bool)
    y, _ = moe(params, CONFIG, x, yes, ~yes, K)
    loose, _ = experts.moe(params, dataclasses.replace(CONFIG, swiglu_limit=1e9), x, yes, ~yes, K)
    bound = (
        10
        * 10
        * (np.abs(params["down"]).sum(-1).max() * 1.5 + np.abs(params["shared_down"]).sum(-1).max())
    )
    assert np.abs(y).max() < bound and np.abs(loose).max() > 10 * np.abs(y).max()


def test_equal_scores_go_to_the_lowest_expert(params):
    flat = params | {"router": jnp.zeros((E, D)), "bias": jnp.zeros(E)}
    chosen, weight = experts.route(flat, CONFIG, jnp.ones((3, D)), jnp.zeros(3, bool), K)
    np.testing.assert_array_equal(chosen, [[0, 1]] * 3)
    np.testing.assert_allclose(weight, CONFIG.routed_scaling / K, rtol=1e-6)


grouped = jax.jit(experts.grouped, static_argnums=1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_assignment(params, data):
    """Empty experts, one for all, nobody at all: T = 24 and 2 are the compiled sizes."""
    tokens = data.draw(st.sampled_from([2, 24]))
    pool = data.draw(st.lists(st.integers(0, E), min_size=1, max_size=E + 1))
    chosen = np.array(
        data.draw(st.lists(st.sampled_from(pool), min_size=2 * tokens, max_size=2 * tokens))
    )
    chosen = chosen.reshape(tokens, 2)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((tokens, D)), rng.random((tokens, 2))
    found = grouped(params, CONFIG, jnp.float32(x), jnp.int32(chosen), jnp.float32(weight))
    for t in range(tokens):
        terms = [
            w * expert(params, e, x[t]) for w, e in zip(weight[t], chosen[t], strict=True) if e < E
        ]
        np.testing.assert_allclose(found[t], sum(terms, np.zeros(D)), atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(params):
    x = jax.random.normal(jax.random.key(3), (1, 24, D))
    yes = jnp.ones((1, 24), bool)
    first, _ = moe(params, CONFIG, x, yes, ~yes, K)
    other, _ = moe(params, CONFIG, x.at[:, 1:].multiply(-1), yes, ~yes, K)
    np.testing.assert_allclose(first[:, 0], other[:, 0], atol=1e-6)
