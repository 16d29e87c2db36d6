"""Drafts against frozen ones of NeMo's public draft model (`tests.oracle.drafting`)."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import drafting, ours


@pytest.mark.parametrize("rounding", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frozen_drafts_of_nemo(rounding: bool) -> None:
    """Prompts shorter than the window, longer, and as long as their buffer."""
    cases = json.loads(drafting.FIXTURE.read_text())["cases"]
    chosen = [case for case in cases if case["rounding"] == rounding]
    assert len(chosen) >= 12
    for case in chosen:
        weights, ids = drafting.sample(case["seed"], case["length"])
        params = jax.tree.map(jnp.asarray, weights)
        token, drafts, confidence = ours.drafted(
            params, drafting.config(), ids, drafting.WIDTH, rounding=rounding
        )
        assert (token, drafts.tolist()) == (case["token"], case["drafts"]), case
        np.testing.assert_allclose(confidence, case["confidences"], atol=1e-4, err_msg=str(case))
