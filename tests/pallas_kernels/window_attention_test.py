"""Window attention: the kernel against its reference, and the reference against float64 numpy."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.window_attention import shapes
from pallas_kernels.window_attention.api import window_attention
from tests.pallas_kernels.races import no_races

TOLERANCE = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 2e-2}


def arguments(shape, seed=0, garbage=True):
    """Random inputs; unseen rows hold NaN; one sequence's last row sees nothing."""
    rng = np.random.default_rng(seed)
    s, q, w = shape.sequences, shape.rows, shape.window
    n = w + q
    query = rng.normal(size=(s, q, shape.heads, shape.width))
    rows = rng.normal(size=(s, n, shape.width))
    last = np.broadcast_to(w + np.arange(q), (s, q)).copy()
    first = last - rng.integers(0, w, size=(s, 1))
    first[-1, -1] = last[-1, -1] + 1
    seen = np.zeros((s, n), bool)
    for i in range(s):
        for a, b in zip(first[i], last[i], strict=True):
            seen[i, a : b + 1] = True
    rows = jnp.asarray(rows, shape.dtype)
    if garbage:
        rows = jnp.where(seen[..., None], rows, jnp.nan)
    if shape.packed:
        rows = formats.pack_row_e4m3(rows)
    return (
        jnp.asarray(query, shape.dtype),
        rows,
        jnp.asarray(first, jnp.int32),
        jnp.asarray(last, jnp.int32),
        jnp.asarray(rng.normal(size=shape.heads), jnp.float32),
    )


def exact(query, rows, first, last, sink):
    """Float64, a loop over rows."""
    query, sink = np.asarray(query, np.float64), np.asarray(sink, np.float64)
    made = np.zeros(query.shape)
    for s, q in np.ndindex(query.shape[:2]):
        keys = np.asarray(rows[s], np.float64)[int(first[s, q]) : int(last[s, q]) + 1]
        scores = query[s, q] @ keys.T / np.sqrt(query.shape[-1])
        weight = np.exp(np.concatenate([scores, sink[:, None]], axis=1))
        made[s, q] = (weight[:, :-1] / weight.sum(1, keepdims=True)) @ keys
    return made


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_the_reference_is_softmax_in_float64(name):
    given = arguments(shapes.TINY[name])
    np.testing.assert_allclose(window_attention(*given, window=8).mixed, exact(*given), atol=2e-6)


QUICK = {"decode", "prefill"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in shapes.TINY]


@pytest.mark.parametrize("kernels", ["interpret", "simulate"])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_reference(name, kernels):
    shape = shapes.TINY[name]
    given = arguments(shape, 1)
    expected = window_attention(*given, window=shape.window)
    run = functools.partial(window_attention, window=shape.window, kernels=kernels)
    with no_races() if kernels == "simulate" else contextlib.nullcontext():
        made = jax.block_until_ready(jax.jit(run)(*given))
    for got, want in zip(made, expected, strict=True):
        scale = TOLERANCE[jnp.dtype(shape.dtype)]
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), atol=scale, rtol=scale
        )


def test_without_a_sink_two_halves_merge_to_the_whole():
    shape = shapes.TINY["decode"]
    query, rows, first, last, sink = arguments(shape, 2, garbage=False)
    none = jnp.full_like(sink, -jnp.inf)
    run = functools.partial(window_attention, window=shape.window, kernels="interpret")
    whole = run(query, rows, first, last, sink)
    middle = (first + last) // 2
    parts = [run(query, rows, first, middle, none), run(query, rows, middle + 1, last, sink)]
    top = jnp.maximum(parts[0].top, parts[1].top)
    share = [part.total * jnp.exp(part.top - top) for part in parts]
    merged = sum(p.mixed * s[..., None] for p, s in zip(parts, share, strict=True))
    np.testing.assert_allclose(merged / (share[0] + share[1])[..., None], whole.mixed, atol=1e-5)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"kernels is 'cuda'.*window_attention"):
        window_attention(*arguments(shapes.TINY["decode"]), window=8, kernels="cuda")
