"""How many rows a ring needs: verify steps of six rows, any of them rejected, at a window of 128.

A reader may ask for the 128 rows before its first one, and the drafter uses all of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import layout
from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.presets import tiny

MODEL, ROWS, S = dataclasses.replace(tiny(), window=128), 6, 4
CONFIGS = {132: CacheConfig(nextn=3), 133: CacheConfig(nextn=4), 134: CacheConfig(nextn=5)}


@jax.jit
def step(memory: PagedMemory, start: jax.Array, keep: jax.Array) -> tuple:
    """The window before each sequence's step, whose rows, holding their positions, are stored."""
    window = memory.read_window(0, start)[..., 0]
    positions = start[:, None] + jnp.arange(keep.shape[1])
    rows = jnp.broadcast_to(positions[..., None] + 0.0, (*positions.shape, MODEL.head_dim))
    return window, memory.write_window(0, positions, rows, keep)


def lost(rows: int, steps: int = 60) -> int:
    """Window rows that were not there when a step began; prompts of 200 .. 203 tokens before."""
    cache = CONFIGS[rows]
    assert layout.ring_rows(MODEL, cache)[1] == rows
    memory = create_paged(MODEL, cache, blocks=2, slots=S + 1, dtype=jnp.float32)
    memory = dataclasses.replace(memory, windows=(memory.windows[0] * jnp.nan,) * MODEL.num_rings)
    memory = bind(memory, jnp.arange(1, S + 1), jnp.ones((S, 1), jnp.int32))
    rng, start = np.random.default_rng(0), np.zeros(S, np.int32)
    wrong = 0
    for n in range(steps):
        count = 200 + np.arange(S) if n == 0 else np.full(S, ROWS)
        keep = np.arange(203) < count[:, None]
        window, memory = step(memory, start, keep if n == 0 else keep[:, :ROWS])
        if n:
            wrong += int((np.asarray(window) != start[:, None] - 128 + np.arange(128)).sum())
        accepted = count - 1 if n == 0 else rng.integers(0, ROWS, S)
        start = (start + 1 + accepted).astype(np.int32)
    return wrong


def test_132_rows_lose_some_of_the_window() -> None:
    assert lost(132) > 0


@pytest.mark.parametrize("rows", [133, 134])
def test_133_and_134_rows_lose_nothing(rows: int) -> None:
    assert lost(rows) == 0
