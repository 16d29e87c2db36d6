"""Our drafter against NeMo's public draft model, live; frozen answers are in tests/model.

The reference is NeMo's `DeepseekV41DSparkModel` on the features of its own backbone, with the
released greedy loop and the confidence of the hidden state before the last norm (`nemo.drafted`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("nemo_automodel")

from tests.oracle import drafting, ours

pytestmark = pytest.mark.oracle


def test_drafts_and_confidences() -> None:
    """Seeds that the frozen answers do not have; without rounding, so nothing is left out."""
    for seed in range(100, 105):
        for length in drafting.LENGTHS:
            weights, ids = drafting.sample(seed, length)
            params = jax.tree.map(jnp.asarray, weights)
            token, drafts, confidence = drafting.draft(weights, ids, rounding=False)
            mine = ours.drafted(params, drafting.config(), ids, drafting.WIDTH, rounding=False)
            assert (mine[0], mine[1].tolist()) == (token, drafts.tolist()), (seed, length)
            np.testing.assert_allclose(mine[2], confidence, atol=1e-5)
