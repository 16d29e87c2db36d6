"""Our processed distribution against the logits processors of transformers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from deepinfer_jax.engine import penalties
from deepinfer_jax.engine.sampling import MASKED, RowContext, pack, process
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams

pytestmark = pytest.mark.oracle

V, ROWS = 50, 8
processed = jax.jit(process)


def theirs(logits: np.ndarray, tokens: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Log-probabilities, -inf for what is cut.

    All filters look at the distribution before any of them, as ours do: each of theirs keeps a
    prefix of the same order, so each is applied to the scaled scores and what all keep stays.
    """
    scores, ids = torch.tensor(logits), torch.tensor(tokens)
    if params.repetition_penalty != 1:
        penalty = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = penalty(ids, scores)
    scores = transformers.TemperatureLogitsWarper(params.temperature)(ids, scores)
    filters = []
    if params.top_k != -1:
        filters.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        filters.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        filters.append(transformers.MinPLogitsWarper(params.min_p))
    cut = torch.zeros_like(scores, dtype=torch.bool)
    for one in filters:
        cut |= torch.isinf(one(ids, scores))
    return torch.log_softmax(scores.masked_fill(cut, -float("inf")), dim=-1).numpy()


def ours(logits: np.ndarray, tokens: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The same, one sequence per row."""
    slots = np.arange(ROWS, dtype=np.int32)
    history = penalties.see_prompt(penalties.create(ROWS, V), slots, tokens.astype(np.int32))
    packed = pack([params] * ROWS, [0] * ROWS, [0] * ROWS, sequences=ROWS, vocab_size=V, eos_id=1,
                  limits=SamplingLimits())  # fmt: skip
    none = np.zeros((ROWS, 0), np.int32)
    row = RowContext(np.zeros((ROWS, 1), np.int32), none, slots, history)
    found = np.asarray(processed(logits[:, None], packed, row))[:, 0]
    return np.where(found == MASKED, -np.inf, found)


WISHES = [
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.08},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("wish", WISHES)
def test_equals_transformers(wish: dict) -> None:
    """Random logits without ties; which ids are kept must be equal, their values to 1e-5."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        logits = (random.normal(size=(ROWS, V)) * 2).astype(np.float32)
        tokens = random.integers(0, V, (ROWS, 9))
        params = SamplingParams(**wish)
        expected, found = theirs(logits, tokens, params), ours(logits, tokens, params)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
        kept = np.isfinite(expected)
        np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-5, atol=1e-5)
