"""Grouped matmul: its schedule against plain counting, its kernel against its reference."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import schedule, shapes
from pallas_kernels.grouped_matmul.api import gated, grouped_matmul
from pallas_kernels.grouped_matmul.weights import pack, unpack
from tests.pallas_kernels.races import no_races

PATTERNS = np.array([[bit >> i & 1 for i in range(8)] for bit in range(256)])
SIZES = np.array([3, 1, 7, 2, 9, 4, 5, 6])
ROWS = 48  # more than all experts have


def weights(shape, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(shape.experts, shape.outputs, shape.inputs)) / shape.inputs**0.5
    return pack(jnp.asarray(values, shape.dtype), shape.format)


def rows(shape, used, seed=1):
    """Random rows; those of nobody are NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(shape.rows, shape.inputs))
    x[used:] = np.nan
    return jnp.asarray(x, shape.dtype), jnp.asarray(rng.uniform(size=shape.rows), jnp.float32)


@pytest.mark.parametrize("block", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_every_row_is_multiplied_once_and_every_block_is_written(block):
    for pattern in PATTERNS:
        sizes = SIZES * pattern
        plan = [np.asarray(a) for a in schedule.visits(jnp.asarray(sizes), ROWS, block)]
        expert, tile, begin, end, fresh = plan
        owner = np.full(ROWS, -1)
        for v in range(len(expert)):
            mine = np.arange(max(begin[v], tile[v] * block), min(end[v], (tile[v] + 1) * block))
            assert (owner[mine] == -1).all()
            owner[mine] = expert[v]
        expected = np.repeat(np.arange(8), sizes)
        np.testing.assert_array_equal(owner[: len(expected)], expected)
        assert (owner[len(expected) :] == -1).all()
        # blocks come in order and in one run each, since an output block is kept between visits
        assert (np.diff(tile) >= 0).all() and set(tile) == set(range(ROWS // block))
        np.testing.assert_array_equal(fresh == 1, np.diff(tile, prepend=-1) != 0)
        # weights are fetched once per expert with rows
        assert (np.diff(expert) != 0).sum() + 1 == max(1, pattern.sum())


def test_the_reference_is_a_loop_over_rows_in_float64():
    shape = shapes.TINY["fp4"]
    packed, (x, scale) = weights(shape), rows(shape, 40)
    sizes = np.array([10, 0, 25, 5])
    made = gated(x, packed, jnp.asarray(sizes), scale, shapes.LIMIT)
    values = np.asarray(unpack(packed, jnp.float32), np.float64)
    for row, expert in enumerate(np.repeat(np.arange(4), sizes)):
        gate, up = np.split(values[expert] @ np.asarray(x[row], np.float64), 2)
        gate, up = np.minimum(gate, shapes.LIMIT), np.clip(up, -shapes.LIMIT, shapes.LIMIT)
        expected = float(scale[row]) * gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(made[row], expected, atol=2e-6)
    assert (np.asarray(made[40:]) == 0).all()


QUICK = {"fp4"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in shapes.TINY]


@pytest.mark.parametrize("kernels", ["interpret", "simulate"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", [True, False])
def test_kernel_equals_reference(name, kernels, gate):
    shape = shapes.TINY[name]._replace(gate=gate)
    packed, (x, scale) = weights(shape), rows(shape, 36)
    sizes = jnp.array([17, 0, 2, 17])
    given = (x, packed, sizes, scale) if gate else (x, packed, sizes)
    with no_races() if kernels == "simulate" else contextlib.nullcontext():
        made = jax.block_until_ready(jax.jit(shape.function(kernels))(*given))
    tolerance = 1e-5 if shape.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        made.astype(jnp.float32),
        shape.function("xla")(*given).astype(jnp.float32),
        atol=tolerance,
        rtol=tolerance,
    )


def test_all_patterns_of_empty_experts():
    shape = shapes.Shape(ROWS, 8, 16, 32, "fp8", False, jnp.float32)
    packed, (x, _) = weights(shape), rows(shape, 37)
    run = jax.jit(functools.partial(grouped_matmul, kernels="interpret"))
    reference = jax.jit(grouped_matmul)
    for pattern in PATTERNS:
        sizes = jnp.asarray(SIZES * pattern)
        filled = jnp.where(jnp.arange(ROWS)[:, None] < sizes.sum(), x, jnp.nan)
        np.testing.assert_allclose(
            run(filled, packed, sizes), reference(filled, packed, sizes), atol=1e-5
        )
