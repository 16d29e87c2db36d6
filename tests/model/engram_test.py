"""Reading the memory: by hand on one token, the dtypes, image tokens, and NeMo's module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.model import engram
from tests.model import engram_nemo

MODEL = presets.tiny()
SIZES = MODEL.engram
STREAMS, WIDTH, ROWS = MODEL.hc_mult, MODEL.hidden_size, SIZES.num_embeddings[0]


@pytest.fixture
def params():
    """Random weights; norms not all ones, so that a missing one shows."""
    generator = np.random.default_rng(0)
    fan_in = SIZES.rows_per_token * SIZES.head_dim
    return {
        "table": jnp.float32(generator.normal(size=(ROWS, SIZES.head_dim))),
        "wkv": jnp.float32(generator.normal(size=((STREAMS + 1) * WIDTH, fan_in)) * fan_in**-0.5),
        "q_weight": jnp.float32(1 + 0.1 * generator.normal(size=(STREAMS, WIDTH))),
        "k_weight": jnp.float32(1 + 0.1 * generator.normal(size=(STREAMS, WIDTH))),
    }


@pytest.fixture
def inputs():
    """Streams, rows and the image mask of two sequences of five tokens."""
    generator = np.random.default_rng(1)
    streams = jnp.float32(generator.normal(size=(2, 5, STREAMS, WIDTH)))
    rows = jnp.int32(generator.integers(0, ROWS, (2, 5, SIZES.rows_per_token)))
    return streams, rows, jnp.zeros((2, 5), bool).at[0, 1].set(True)


apply = jax.jit(engram.apply, static_argnums=1)


def by_definition(params, streams, rows):
    """One token in float64, streams one by one; the pages' formula."""
    p = {name: np.float64(value) for name, value in params.items()}
    *keys, value = np.split(p["wkv"] @ np.concatenate([p["table"][r] for r in rows]), STREAMS + 1)
    result = []
    for s in range(STREAMS):
        stream, key = np.float64(streams[s]), keys[s]
        query = p["q_weight"][s] * stream / np.sqrt(np.mean(stream**2))
        key = p["k_weight"][s] * key / np.sqrt(np.mean(key**2))
        dot = query @ key / np.sqrt(WIDTH)
        root = np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))
        result.append(stream + value / (1 + np.exp(-root)))
    return np.stack(result)


def test_each_text_token_by_definition(params, inputs):
    streams, rows, is_image = inputs
    found = apply(params, MODEL, streams, rows, is_image)
    for s, q in np.argwhere(~np.asarray(is_image)):
        wanted = by_definition(params, np.asarray(streams[s, q]), np.asarray(rows[s, q]))
        np.testing.assert_allclose(found[s, q], wanted, atol=2e-6)


def test_image_tokens_keep_their_streams_whatever_their_rows(params, inputs):
    streams, rows, is_image = inputs
    rows = jnp.where(is_image[..., None], -1, rows)
    found = apply(params, MODEL, streams, rows, is_image)
    np.testing.assert_array_equal(found[0, 1], streams[0, 1])
    changed = np.any(np.asarray(found != streams), axis=(-2, -1))
    np.testing.assert_array_equal(changed, ~is_image)


def test_a_dot_of_zero_opens_the_gate_by_the_floor(params, inputs):
    """The released kernel: sigmoid(1e-3) of the value."""
    streams, rows, is_image = inputs
    found = apply({**params, "q_weight": 0 * params["q_weight"]}, MODEL, streams, rows, is_image)
    value = params["wkv"][-WIDTH:] @ params["table"][rows[1, 2]].reshape(-1)
    wanted = streams[1, 2] + value / (1 + np.exp(-1e-3))
    np.testing.assert_allclose(found[1, 2], wanted, atol=1e-6)


def test_bfloat16_stays_near_float32(params, inputs):
    streams, rows, is_image = inputs
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    found = apply(low, MODEL, streams.astype(jnp.bfloat16), rows, is_image)
    assert found.dtype == jnp.bfloat16
    exact = apply(
        jax.tree.map(jnp.float32, low),
        MODEL,
        jnp.float32(streams.astype(jnp.bfloat16)),
        rows,
        is_image,
    )
    np.testing.assert_allclose(jnp.float32(found), exact, rtol=2**-8, atol=2e-2)


@pytest.mark.oracle
def test_equal_to_nemo(params, inputs):
    torch = pytest.importorskip("torch")
    module_file = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    from nemo_automodel.components.models.common import BackendConfig

    streams, rows, is_image = inputs
    config = engram_nemo.text_config(
        hidden_size=WIDTH,
        hc_mult=STREAMS,
        engram_layer_ids=list(SIZES.layer_ids),
        engram_num_embeddings=list(SIZES.num_embeddings),
        engram_head_dim=SIZES.head_dim,
    )
    module = module_file.DeepseekV41Engram(
        config, SIZES.layer_ids[0], BackendConfig(linear="torch")
    )
    names = {"table": module.embed, "wkv": module.wkv}
    with torch.no_grad():
        for name, holder in names.items():
            holder.weight.copy_(torch.from_numpy(np.array(params[name])))
        module.q_weight.copy_(torch.from_numpy(np.array(params["q_weight"])))
        module.k_weight.copy_(torch.from_numpy(np.array(params["k_weight"])))
        wanted = module(
            torch.from_numpy(np.array(streams)),
            torch.from_numpy(np.array(rows)),
            token_mask=torch.from_numpy(~np.array(is_image)),
        )
    found = apply(params, MODEL, streams, rows, is_image)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
