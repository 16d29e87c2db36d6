"""What is said of a trained model: held-out loss, routing, and acceptance on the cached path."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.cost import acceptance
from experiments.training import losses, whole
from experiments.training.decoding import Decoder

BINS = 5  # of the calibration table


def held_out(params: Any, config: ModelConfig, tokens: np.ndarray, size: int = 8) -> dict[str, Any]:
    """Nats per token of tokens [S, T] and visits [L][E]; S a multiple of `size`."""

    def one(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = whole.forward(params, config, part)
        return losses.next_token_nats(made.logits, part).mean(), made.visits

    compiled = jax.jit(one)
    found = [jax.device_get(compiled(tokens[i : i + size])) for i in range(0, len(tokens), size)]
    return {
        "nats": float(np.mean([nats for nats, _ in found])),
        "visits": sum(visits for _, visits in found).tolist(),
    }


def speculation(decoder: Decoder, prompts: np.ndarray, count: int) -> dict[str, Any]:
    """Acceptance and calibration while `count` tokens follow each of prompts [S, T]."""
    steps = [
        (int(step.accepted), np.asarray(step.confidence))
        for prompt in prompts
        for step in list(decoder.generate(prompt, count, stop=-1))[1:]
    ]
    accepted = np.array([a for a, _ in steps])
    survival = [float((accepted > k).mean()) for k in range(decoder.drafts)]
    return {
        "steps": len(steps),
        "survival": survival,
        "conditionals": acceptance.conditionals_from_survival(survival),
        "tokens_per_step": acceptance.tau_from_survival(survival),
        "calibration": calibration(accepted, np.stack([c for _, c in steps])),
    }


def calibration(accepted: np.ndarray, confidence: np.ndarray) -> dict[str, Any]:
    """Confidence against acceptance, of drafts all before which were accepted.

    Args:
      accepted: int [N] drafts accepted in each step.
      confidence: float [N, drafts].

    Returns:
      The expected calibration error over `BINS` even bins, and the bins.
    """
    position = np.arange(confidence.shape[1])
    judged = position <= accepted[:, None]
    said, right = confidence[judged], (position < accepted[:, None])[judged]
    which = np.minimum((said * BINS).astype(int), BINS - 1)
    rows = [
        {
            "drafts": int((which == b).sum()),
            "confidence": float(said[which == b].mean()),
            "accepted": float(right[which == b].mean()),
        }
        for b in range(BINS)
        if (which == b).any()
    ]
    error = sum(r["drafts"] * abs(r["confidence"] - r["accepted"]) for r in rows) / len(said)
    return {"expected_error": error, "bins": rows}
