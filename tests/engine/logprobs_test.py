"""Reported log-probabilities against sorting."""

import jax
import numpy as np

from deepinfer_jax.engine.logprobs import FLOOR, choose, model_log_probs, report
from deepinfer_jax.engine.sampling import MASKED

reported = jax.jit(report, static_argnums=2)


def test_equals_sorting_with_ties_by_id() -> None:
    logits = np.random.default_rng(0).integers(0, 4, (2, 3, 11)).astype(np.float32)
    log_probs = np.asarray(model_log_probs(logits))
    tokens = np.array([[0, 5, 10], [3, 3, 11]], np.int32)  # 11: padding
    found = reported(log_probs, tokens, 4)
    for i in np.ndindex(2, 3):
        row = logits[i] - np.log(np.exp(logits[i].astype(np.float64)).sum())
        order = sorted(range(11), key=lambda v: (-logits[i][v], v))
        assert np.asarray(found.ids[i]).tolist() == order[:4]
        np.testing.assert_allclose(found.values[i], row[order[:4]], rtol=1e-5)
        if tokens[i] < 11:
            np.testing.assert_allclose(found.chosen[i], row[tokens[i]], rtol=1e-5)
            assert int(found.rank[i]) == sum(logits[i] > logits[i][tokens[i]])
    assert (float(found.chosen[1, 2]), int(found.rank[1, 2])) == (FLOOR, 11)


def test_masked_ids_have_the_floor() -> None:
    row = np.full((1, 1, 5), MASKED, np.float32)
    row[..., 2] = 0
    found = reported(row, np.array([[4]], np.int32), 2)
    assert np.asarray(found.values).tolist() == [[[0, FLOOR]]]
    assert (float(found.chosen[0, 0]), int(found.rank[0, 0])) == (FLOOR, 1)


def test_each_request_chooses_its_distribution() -> None:
    a, b = np.zeros((2, 1, 3)), np.ones((2, 1, 3))
    assert np.asarray(choose(a, b, np.array([True, False])))[:, 0, 0].tolist() == [1, 0]
