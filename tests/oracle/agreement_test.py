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
from tests.oracle import mlx, models, nemo, ours
from tests.oracle.agreement import TOLERANCE
from tests.oracle.comparison import LENGTH, QUICK, WAYS, Scores, compare, subject
from tests.oracle.random_weights import random_parameters

pytestmark = pytest.mark.oracle

UNSHRUNK = settings(
    derandomize=True, database=None, deadline=None, max_examples=8, phases=[Phase.generate]
)
QUICK_SEEDS = range(5)
ALL_SEEDS = range(20)


def check(scores: Scores, rounding: bool) -> None:
    """The bounds of `Scores.check`, with the figures on the output."""
    print(scores.record(), *(note for one in scores.values() for note in one.notes), sep="\n")
    scores.check(rounding)


def test_every_way_without_rounding() -> None:
    """Prompts, chunks, single tokens, verify steps with rollback; nothing to excuse."""
    check(compare(models.plain(), QUICK_SEEDS, False, QUICK), False)


def test_prompts_and_chunks_with_rounding() -> None:
    ways = {way: QUICK[way] for way in ("prefill", "chunked")}
    check(compare(models.plain(), QUICK_SEEDS, True, ways), True)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [True, False])
def test_every_way(rounding: bool) -> None:
    check(compare(models.plain(), ALL_SEEDS, rounding), rounding)


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
        weights = random_parameters(models.plain(), seed)
        ids = np.random.default_rng(seed).integers(0, models.plain().vocab_size, LENGTH)
        nemo.logits(nemo.backbone(models.plain(), weights), ids)
    assert seen == set(ours_of)


def test_engram() -> None:
    check(compare(models.remembering(), QUICK_SEEDS, False, {"prefill": WAYS["prefill"]}), False)


@pytest.mark.slow
def test_engram_in_chunks_with_rounding() -> None:
    ways = {"prefill": WAYS["prefill"], "chunked": WAYS["chunked"][:1]}
    check(compare(models.remembering(), ALL_SEEDS, True, ways), True)


def test_image_rows() -> None:
    """Image rows stand for the embedding, are routed under `bias_image` and pass Engram by (NeMo)."""
    config = models.remembering()
    is_image = np.zeros(LENGTH, bool)
    is_image[[*range(3, 12), *range(20, 27)]] = True
    for seed in QUICK_SEEDS:
        with subject(config, seed, False) as one:
            vectors = np.random.default_rng(seed).standard_normal(
                (LENGTH, config.hidden_size), np.float32
            )
            mine = ours.illustrated(one.params, config, one.ids, is_image, vectors, False)
            weights = random_parameters(config, seed)
            truth = nemo.illustrated(nemo.backbone(config, weights), one.ids, is_image, vectors)
        np.testing.assert_allclose(mine, truth, rtol=0, atol=TOLERANCE)
        assert np.abs(truth - one.truth).max() > 1e-2


def test_truncation_against_mlx() -> None:
    """Kept rows of mask mode, and single tokens after them, equal mlx-lm under the same mask."""
    config, keep, prompt = models.plain(), 12, LENGTH - 6
    for seed in QUICK_SEEDS:
        with subject(config, seed, False) as one:
            cut = {"rounding": False, "truncation": "mask", "keep": keep}
            memory = ours.empty(config, LENGTH)
            mine, memory = ours.extend(
                one.params, config, memory, one.ids[:prompt], 0, prompt, LENGTH, **cut
            )
            cache = one.other.make_cache()
            with mlx.truncated(config, prompt - keep):
                theirs = mlx.extend(one.other, cache, one.ids[:prompt])
                pairs = [(mine[-keep:], theirs[-keep:])]
                for at in range(prompt, LENGTH):
                    mine, memory = ours.extend(
                        one.params, config, memory, one.ids, at, 1, ours.CHUNK, rounding=False
                    )
                    pairs.append((mine, mlx.extend(one.other, cache, one.ids[at : at + 1])))
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE)
        assert np.abs(pairs[0][1][0] - one.truth[prompt - keep]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [True, False])
def test_every_shape(rounding: bool) -> None:
    scores = Scores()

    @UNSHRUNK
    @given(models.models(), st.integers(0, 2**31))
    def run(config: ModelConfig, seed: int) -> None:
        ways = {way: QUICK[way] for way in ("prefill", "chunked")}
        compare(config, range(seed, seed + 4), rounding, ways, scores)

    run()
    check(scores, rounding)


@pytest.mark.slow
def test_truncation() -> None:
    """compact = mask; the last row is the whole model's from n (W - 1) + 1 rows on."""
    config = models.plain()
    bound = (config.num_layers - config.boundary_layer) * (config.window - 1) + 1
    params = jax.tree.map(jnp.asarray, random_parameters(config, 0))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, LENGTH)
    whole, _ = ours.prompt(params, config, ids, rounding=False)
    for keep in (bound, 12):
        cut = {"rounding": False, "keep": keep}
        masked, _ = ours.prompt(params, config, ids, truncation="mask", **cut)
        compact, _ = ours.prompt(params, config, ids, truncation="compact", **cut)
        np.testing.assert_allclose(compact, masked[-keep:], atol=1e-5)
        gap = np.abs(compact[-1] - whole[-1]).max()
        assert (gap < 1e-5) == (keep >= bound)
