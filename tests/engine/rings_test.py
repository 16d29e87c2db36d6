"""Rings under the model: rejected rows, images taken late, restarts before an image's end.

A window of 8 in rings of 14: as 128 in 134. All other memory is poisoned.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import snapshots
from deepinfer_jax.cache.paged import PagedMemory, bind
from deepinfer_jax.config import EngineConfig
from deepinfer_jax.engine.plan import PlanRow
from deepinfer_jax.model import draft
from deepinfer_jax.model.numerics import EXACT
from tests.engine.modelled import (
    LEVEL,
    LOOKBACK,
    MEMORY,
    MODEL,
    Device,
    prompt,
    weights,
)

TOKENS = prompt(60, 3)
CONFIG = EngineConfig(cache=MEMORY, max_model_len=80, max_num_seqs=3, num_blocks=40)
BLOCKS = tuple(range(1, 9))
POISON = float("nan")


def device() -> Device:
    made = Device(CONFIG)
    made.poison(POISON)
    return made


def run(
    device: Device,
    start: int,
    end: int,
    *,
    tokens: list[int] = TOKENS,
    slot: int = 1,
    blocks: tuple[int, ...] = BLOCKS,
    kept: int = 0,
) -> np.ndarray:
    """Logits of the last of the rows start .. end - 1."""
    lookback = tuple(tokens[max(0, start - LOOKBACK) : start])
    row = PlanRow(0, end - start, end, tuple(tokens[start:end]), lookback, blocks, slot)
    return device.run(row, kept)


def distance(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@functools.cache
def plain(end: int, kept: int = 0) -> np.ndarray:
    """The last row's logits of a cold prompt in at most two chunks, none of it taken back."""
    made = device()
    if end > 40:
        run(made, 0, 40, kept=kept)
    return run(made, 40 if end > 40 else 0, end, kept=kept)


@pytest.mark.parametrize("rows", [6, 7])
def test_rejected_rows_spare_what_the_backbone_reads(rows: int) -> None:
    """Window and compression rings, in steps of which any number of rows is rejected."""
    made, at = device(), 32
    run(made, 0, at)
    for accepted in (0, 0, rows - 1, 0, 2, 0):
        run(made, at, at + rows, tokens=TOKENS[: at + 1] + [7] * 20)
        for _ in range(accepted):  # now with the rows that were right
            at += 1
            run(made, at, at + 1)
        at += 1
        assert distance(run(made, at, at + 1), plain(at + 1)) < 1e-4


@functools.partial(jax.jit, compiler_options=LEVEL)
def drafts(params, memory: PagedMemory, token: jax.Array, position: jax.Array) -> jax.Array:
    memory = bind(memory, jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    return draft.propose(params, MODEL, token, position, memory, 5, numerics=EXACT).logits


@pytest.mark.parametrize(("rows", "safe"), [(6, True), (7, True), (8, False)])
def test_rejected_rows_spare_what_the_drafter_reads(rows: int, safe: bool) -> None:
    """Window + rows - 1 rows are needed: 133 for steps of six, so that 132 are too few."""
    found = []
    for count in (1, rows):  # rows of the step; all but the first are rejected
        made = device()
        run(made, 0, 32)
        run(made, 32, 32 + count, tokens=TOKENS[:33] + [7] * 20)
        found.append(drafts(weights(), made.memory, jnp.array([5]), jnp.array([33])))
    gap = distance(np.asarray(found[1]), np.asarray(found[0]))
    assert gap < 1e-5 if safe else gap > 1e-2


def restarted(past: int, restart: int) -> float:
    """Distance from a cold prompt, after an image as of 32 taken `past` rows later and loaded."""
    made = device()
    run(made, 0, 32)
    if past:
        run(made, 32, 32 + past, tokens=TOKENS[:32] + [7] * 20)
    made.memory = snapshots.load(made.memory, 2, made.snapshot(1, 32))
    kept = 40
    found = run(made, restart, 60, slot=2, blocks=(*BLOCKS[:4], 31, 32, 33, 34), kept=kept)
    return distance(found, plain(60, kept))


def test_an_image_may_be_taken_six_rows_late() -> None:
    """A verify step that crosses a block's end goes on by five rows at most.

    Seven rows destroy the oldest of the window before 32, which the row at 32 itself does not see.
    """
    assert restarted(0, 32) < 1e-5 and restarted(5, 32) < 1e-5 and restarted(6, 32) < 1e-5
    assert restarted(8, 32) > 1e-3


def test_an_image_may_be_rewound_by_six_rows() -> None:
    assert restarted(0, 28) < 1e-5 and restarted(0, 26) < 1e-5
    assert restarted(0, 24) > 1e-3


def test_each_late_row_costs_one_row_of_rewind() -> None:
    assert restarted(2, 28) < 1e-5
    assert restarted(4, 26) > 1e-3
