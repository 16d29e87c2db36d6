"""Sparse attention: its schedule by numpy, its kernel against its reference, that against float64."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.sparse_attention import rows, schedule, shapes
from tests.pallas_kernels.races import no_races

GARBAGE = 0xFFFFFFFF  # every code the largest, every scale NaN


def arguments(shape, seed=0):
    """Random inputs and the rows' values; unselected rows are garbage; one query selects nothing."""
    rng = np.random.default_rng(seed)
    s, q, k, n = shape.sequences, shape.rows, shape.selected, shape.page_rows
    held = shape.pages * n
    tables = rng.permutation(s * shape.pages).reshape(s, shape.pages)
    index = np.stack([[rng.permutation(held)[:k] for _ in range(q)] for _ in range(s)])
    valid = rng.random((s, q, k)) < 0.8
    valid[-1, -1] = False
    address = tables[np.arange(s)[:, None, None], index // n] * n + index % n
    values = np.array(formats.fake_fp4_e4m3(jnp.float32(rng.normal(size=(s * held, shape.width)))))
    pool = np.array(rows.spread_rows(formats.pack_row_fp4_e4m3(jnp.asarray(values))))
    selected = np.zeros(len(pool), bool)
    selected[address[valid]] = True
    pool[~selected] = GARBAGE
    index[~valid] = 10**6
    query = jnp.asarray(rng.normal(size=(s, q, shape.heads, shape.width)), shape.dtype)
    given = query, *(jnp.asarray(x) for x in (pool, np.int32(tables), np.int32(index), valid))
    return given, values[address]


def test_words_hold_a_row_and_give_up_its_channels_in_the_stated_order():
    values = formats.fake_fp4_e4m3(jax.random.normal(jax.random.key(0), (5, 512)))
    packed = formats.pack_row_fp4_e4m3(values)
    words = rows.spread_rows(packed)
    np.testing.assert_array_equal(rows.gather_rows(words), packed)
    order = np.asarray(rows.channel_order(512))
    codes = [np.asarray(words)[:, 0] >> shift & 15 for shift in (0, 4, 8, 12)]
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[np.concatenate(codes, 1) & 7]
    scale = np.asarray(
        formats.decode_fp4_e4m3(jnp.full((5, 256), 0x22, jnp.uint8), packed[:, 256:])
    )
    np.testing.assert_allclose(value * scale[:, order], np.abs(values)[:, order], rtol=1e-6)


@pytest.mark.parametrize("block", [4, 8])
def test_the_schedule_lists_the_valid_rows_in_order_and_repeats_the_last(block):
    rng = np.random.default_rng(1)
    tables, index = rng.permutation(12).reshape(2, 6), rng.integers(0, 30, (2, 50, 9))
    valid = rng.random(index.shape) < rng.random((2, 50, 1))
    given = [jnp.asarray(x) for x in (tables, np.where(valid, index, -5), valid)]
    address, count = schedule.fetches(*given, 5, block)
    assert address.shape[-1] == -(-9 // block) * block
    for s, q in np.ndindex(2, 50):
        wanted = [tables[s, j // 5] * 5 + j % 5 for j in index[s, q][valid[s, q]]]
        assert count[s, q] == len(wanted)
        padded = wanted + wanted[-1:] * (address.shape[-1] - len(wanted))
        assert not wanted or address[s, q].tolist() == padded


def test_the_reference_is_softmax_in_float64():
    shape = shapes.TINY["prefill"]
    given, values = arguments(shape)
    made = jax.jit(shape.function("xla"))(*given)
    query, valid = np.asarray(given[0], np.float64), np.asarray(given[4])
    for s, q in np.ndindex(query.shape[:2]):
        keys = np.asarray(values[s, q][valid[s, q]], np.float64)
        weight = np.exp(query[s, q] @ keys.T / np.sqrt(shape.width))
        total = weight.sum(1, keepdims=True)
        expected = weight @ keys / np.where(total > 0, total, 1)
        np.testing.assert_allclose(made.mixed[s, q], expected, atol=2e-6)
        np.testing.assert_allclose(
            made.total[s, q] * np.exp(made.top[s, q]), total[:, 0], rtol=1e-5
        )


CASES = [
    ("decode", "interpret"),
    ("decode", "simulate"),
    *(
        pytest.param(name, kernels, marks=pytest.mark.slow)
        for name in ("prefill", "bf16")
        for kernels in ("interpret", "simulate")
    ),
]


@pytest.mark.parametrize("name, kernels", CASES)
def test_kernel_equals_reference(name, kernels):
    shape = shapes.TINY[name]
    given, _ = arguments(shape, 1)
    expected = jax.jit(shape.function("xla"))(*given)
    with no_races() if kernels == "simulate" else contextlib.nullcontext():
        made = jax.block_until_ready(jax.jit(shape.function(kernels))(*given))
    scale = 1e-5 if shape.dtype == jnp.float32 else 2e-2
    for got, want in zip(made, expected, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, atol=scale, rtol=scale)
