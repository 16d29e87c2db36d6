"""The model by interpreted kernels: the same attention and experts as by XLA, part by part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.model import attention, backbone, experts
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.model.rows import text_rows
from pallas_kernels.softmax import Attended, merge

MODEL = presets.tiny()


class Rows:
    """A memory that holds just the global rows [S, G, C] of one source."""

    def __init__(self, rows: jax.Array) -> None:
        self.rows = rows

    def read_global(self, source: int, index: jax.Array) -> jax.Array:
        flat = jnp.take_along_axis(self.rows, index.reshape(len(index), -1)[..., None], axis=1)
        return flat.reshape(*index.shape, -1)


@pytest.mark.parametrize("source", [None, 2])
@pytest.mark.parametrize("count", [1, 11])
def test_attention_by_kernels_is_attention_by_xla(count, source):
    rng = np.random.default_rng(count)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    sequences, heads, width, window, groups, chosen = 3, 4, 32, 8, 20, 6
    start = np.array([0, 5, 40])
    positions = jnp.asarray(start[:, None] + np.arange(count))
    seen_from = jnp.maximum(positions - window + 1, jnp.asarray([[0], [3], [0]]))
    seen_from = seen_from.at[2, -1].set(positions[2, -1] + 1)  # a row that sees no window row
    selection = Selection(
        jnp.asarray(rng.integers(0, groups, (sequences, count, chosen))),
        jnp.asarray(rng.random((sequences, count, chosen)) < 0.7).at[0].set(False),
        None,
    )
    given = (
        normal(sequences, count, heads, width),
        normal(sequences, window + count, width),
        seen_from,
        positions,
        normal(heads),
        Rows(normal(sequences, groups, width)),
        source,
        selection if source is not None else None,
    )
    np.testing.assert_allclose(
        attention.attend(*given, kernels="interpret"), attention.attend(*given), atol=2e-6
    )


def test_parts_of_one_softmax_merge():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(7, 5)) * 9, rng.normal(size=(5, 3))
    parts = []
    for part in (slice(0, 2), slice(2, 5)):
        top = scores[:, part].max(1)
        weight = np.exp(scores[:, part] - top[:, None])
        mixed = weight @ values[part] / weight.sum(1)[:, None]
        shaped = (mixed[None, :, None], top[None, :, None], weight.sum(1)[None, :, None])
        parts.append(Attended(*(jnp.asarray(x, jnp.float32) for x in shaped)))
    weight = np.exp(scores - scores.max(1)[:, None])
    expected = weight @ values / weight.sum(1)[:, None]
    np.testing.assert_allclose(merge(*parts)[0, :, 0], expected, atol=1e-6)
    nothing = Attended(jnp.zeros((1, 7, 1, 3)), jnp.full((1, 7, 1), -3e38), jnp.zeros((1, 7, 1)))
    np.testing.assert_array_equal(merge(nothing, parts[0]), parts[0].mixed)
    np.testing.assert_array_equal(merge(nothing, nothing), 0)


@pytest.mark.parametrize("tokens", [1, 23])
def test_experts_by_kernels_are_experts_by_xla(tokens):
    rng = np.random.default_rng(tokens)
    many, inner, width, active = 8, 32, 64, 2
    params = {
        "gate_up": jnp.asarray(rng.normal(size=(many, 2 * inner, width)) / 8, jnp.float32),
        "down": jnp.asarray(rng.normal(size=(many, width, inner)) / 6, jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32)
    chosen = np.stack([rng.permutation(many)[:active] for _ in range(tokens)])
    chosen[0] = (many, 3)  # one of them is nobody
    given = (params, MODEL, x, jnp.int32(chosen), jnp.float32(rng.random((tokens, active))))
    made = experts.grouped(*given, kernels="interpret")
    np.testing.assert_allclose(made, experts.grouped(*given), atol=2e-6)


def test_kernels_that_do_not_run_here_are_refused():
    rows = text_rows(MODEL, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1))
    memory = create_dense(MODEL, 1, 16)
    with pytest.raises(ValueError, match="kernels is 'tpu' but jax runs on 'cpu'; choose xla"):
        backbone.forward({}, MODEL, rows, memory, kernels="tpu")
    with pytest.raises(ValueError, match="kernels is 'gpu', which the model does not have"):
        backbone.forward({}, MODEL, rows, memory, kernels="gpu")
