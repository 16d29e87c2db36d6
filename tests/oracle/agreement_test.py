"""Our model against two public implementations, in float32, on random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("nemo_automodel")
pytest.importorskip("mlx_lm")

from deepinfer_jax.config import ModelConfig
from pallas_kernels import formats
from tests.oracle import margins, mlx, models, nemo, ours
from tests.oracle.agreement import Tally
from tests.oracle.random_weights import random_parameters

pytestmark = pytest.mark.oracle

LENGTH = 40
SPLITS = [[11, 6, 6, 1, 3], [1, 2, 3, 4, 5, 6, 7], [12, 1, 12, 1], [5, 5, 5, 5, 5, 5]]
UNSHRUNK = settings(
    derandomize=True, database=None, deadline=None, max_examples=8, phases=[Phase.generate]
)


def sample(config: ModelConfig, seed: int) -> tuple[dict[str, Any], Any, np.ndarray]:
    """Weights for the references, the same for us, and a prompt."""
    weights = random_parameters(config, seed)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, LENGTH)
    return weights, jax.tree.map(jnp.asarray, weights), ids


def compare(config: ModelConfig, seed: int, rounding: bool, splits: list[list[int]], tally: Tally):
    """One shot and every split, against NeMo's one shot and mlx-lm's same split."""
    weights, params, ids = sample(config, seed)
    with nemo.rounding(rounding), mlx.rounding(rounding):
        model = nemo.backbone(config, weights)
        with margins.watched(LENGTH) as doubts:
            truth = nemo.logits(model, ids)
        mine, _ = ours.prompt(params, config, ids, rounding=rounding)
        tally.judge(mine, truth, doubts, f"NeMo, seed {seed}, rounding {rounding}, one shot")
        other = None if config.engram else mlx.backbone(config, weights)
        for lengths in splits:
            where = f"seed {seed}, rounding {rounding}, chunks {lengths}"
            mine = ours.in_chunks(params, config, ids, lengths, rounding=rounding)
            tally.judge(mine, truth, doubts, f"NeMo, {where}")
            if other is not None:
                theirs = mlx.in_chunks(other, ids, [*lengths, *[ours.CHUNK] * LENGTH])
                tally.judge(mine, theirs, doubts, f"mlx-lm, {where}")


def test_prompts_and_chunks() -> None:
    tally = Tally()
    for seed in range(20):
        compare(models.plain(), seed, True, SPLITS, tally)
    print(tally.record(), *tally.notes, sep="\n")
    tally.check()


def test_codes_are_equal_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is not where we may differ: on NeMo's own rows our codes are NeMo's."""
    ours_of = {
        "fp8": formats.fake_e4m3,
        "nvfp4": formats.fake_fp4_e4m3,
        "mxfp4": formats.fake_mxfp4,
    }
    original, seen = nemo.attention.quantize_cache, set()

    def both(values: Any, **how: Any) -> Any:
        out = original(values, **how)
        mine = ours_of[how["format"]](jnp.asarray(values.numpy()))
        np.testing.assert_array_equal(np.asarray(mine), out.numpy())
        seen.add(how["format"])
        return out

    monkeypatch.setattr(nemo.attention, "quantize_cache", both)
    for seed in range(3):
        weights, _, ids = sample(models.plain(), seed)
        nemo.logits(nemo.backbone(models.plain(), weights), ids)
    assert seen == set(ours_of)


def test_unrounded_prompts_leave_nothing_to_excuse() -> None:
    tally = Tally()
    for seed in range(20):
        compare(models.plain(), seed, False, [], tally)
    print(tally.record())
    assert not tally.excused


def test_decode_token_by_token() -> None:
    tally = Tally()
    for seed in range(4):
        compare(models.plain(), seed, False, [[1] * LENGTH], tally)
    assert tally.rows and not tally.excused


def test_verify_steps_that_accept_a_part() -> None:
    """Six rows are written, `accepted` of them count, and the next step starts behind those.

    Without rounding, so that a near-tie of a code excuses nothing.
    """
    with nemo.rounding(False), mlx.rounding(False):
        verify_steps()


def verify_steps() -> None:
    config, tally = models.plain(), Tally()
    for seed in range(8):
        weights, params, ids = sample(config, seed)
        dice = np.random.default_rng(seed + 100)
        reference = mlx.backbone(config, weights)
        with margins.watched(LENGTH) as doubts:
            nemo.logits(nemo.backbone(config, weights), ids)
        cache = reference.make_cache()
        theirs = [mlx.extend(reference, cache, ids[:9])]
        mine, memory = ours.extend(
            params, config, ours.empty(config, LENGTH), ids, 0, 9, ours.CHUNK, rounding=False
        )
        rows, at = [mine], 9
        while at + 6 <= LENGTH:
            accepted = int(dice.integers(1, 7))
            guess = ids.copy()
            guess[at + accepted : at + 6] = dice.integers(0, config.vocab_size, 6 - accepted)
            mine, memory = ours.extend(
                params, config, memory, guess, at, 6, ours.CHUNK, rounding=False
            )
            rows.append(mine[:accepted])
            trial = mlx.snapshot(cache)
            mlx.extend(reference, trial, guess[at : at + 6])
            theirs.append(mlx.extend(reference, cache, ids[at : at + accepted]))
            at += accepted
        tally.judge(np.concatenate(rows), np.concatenate(theirs), doubts, f"seed {seed}")
    print(tally.record(), *tally.notes, sep="\n")
    assert tally.rows and not tally.excused


def test_engram() -> None:
    tally = Tally()
    for seed in range(20):
        compare(models.remembering(), seed, True, SPLITS[:1], tally)
    print(tally.record(), *tally.notes, sep="\n")
    tally.check()


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [True, False])
def test_every_shape(rounding: bool) -> None:
    tally = Tally()

    @UNSHRUNK
    @given(models.models(), st.integers(0, 2**31))
    def run(config: ModelConfig, seed: int) -> None:
        for step in range(4):
            compare(config, seed + step, rounding, SPLITS[:2], tally)

    run()
    print(tally.record(), *tally.notes, sep="\n")
    tally.check()


@pytest.mark.slow
def test_truncation() -> None:
    """compact = mask; the last row is the whole model's from n (W - 1) + 1 rows on."""
    config = models.plain()
    bound = (config.num_layers - config.boundary_layer) * (config.window - 1) + 1
    _, params, ids = sample(config, 0)
    whole, _ = ours.prompt(params, config, ids, rounding=False)
    for keep in (bound, 12):
        cut = {"rounding": False, "keep": keep}
        masked, _ = ours.prompt(params, config, ids, truncation="mask", **cut)
        compact, _ = ours.prompt(params, config, ids, truncation="compact", **cut)
        np.testing.assert_allclose(compact, masked[-keep:], atol=1e-5)
        gap = np.abs(compact[-1] - whole[-1]).max()
        assert (gap < 1e-5) == (keep >= bound)
