"""What is said of a trained model: held-out loss, routing, and acceptance on the cached path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.cost import acceptance
from experiments.training import losses, whole
from experiments.training.decoding import Decoder, Step

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


def speculation(
    decoder: Decoder, plain: Decoder, prompts: np.ndarray, count: int
) -> dict[str, Any]:
    """Acceptance and calibration while `count` tokens follow each of prompts [S, T].

    `same_text` is the share of answers that equal what `plain`, without drafts, makes.
    """
    same = [
        tokens(decoder.generate(prompt, count, stop=-1))[:count]
        == tokens(plain.generate(prompt, count, stop=-1))[:count]
        for prompt in prompts
    ]
    accepted, confidence = drafted(decoder, prompts, count)
    survival = [float((accepted > k).mean()) for k in range(decoder.drafts)]
    return {
        "prompts": len(prompts),
        "generated": count,
        "same_text": float(np.mean(same)),
        "steps": len(accepted),
        "survival": survival,
        "conditionals": acceptance.conditionals_from_survival(survival),
        "tokens_per_step": acceptance.tau_from_survival(survival),
        "calibration": calibration(accepted, confidence),
    }


def drafted(decoder: Decoder, prompts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(accepted int [N], confidence [N, drafts]) of all steps that make `count` tokens a prompt."""
    steps = [
        step for prompt in prompts for step in list(decoder.generate(prompt, count, stop=-1))[1:]
    ]
    return np.array([int(s.accepted) for s in steps]), np.stack([s.confidence for s in steps])


def confidence_scale(accepted: np.ndarray, confidence: np.ndarray) -> float:
    """What to multiply the head's logits by: of some scales the one of least cross entropy.

    Args: as for `calibration`. Only drafts all before which were accepted count.
    """
    position = np.arange(confidence.shape[1])
    judged = position <= accepted[:, None]
    right = (position < accepted[:, None])[judged]
    sure = np.clip(confidence[judged].astype(np.float64), 1e-6, 1 - 1e-6)
    logits = np.log(sure / (1 - sure))
    scales = np.linspace(0.1, 2, 39)
    signed = np.where(right, -1, 1) * logits
    return float(scales[np.argmin([np.logaddexp(0, s * signed).mean() for s in scales])])


def tokens(steps: Iterable[Step]) -> list[int]:
    """All tokens that the steps made."""
    return [t for step in steps for t in np.asarray(step.tokens)[: int(step.accepted) + 1].tolist()]


def calibration(accepted: np.ndarray, confidence: np.ndarray) -> dict[str, Any]:
    """Confidence against acceptance, of drafts all before which were accepted.

    Args:
      accepted: int [N] drafts accepted in each step.
      confidence: float [N, drafts].

    Returns:
      The expected calibration error over `BINS` even bins; means over all drafts, by bin, and by
      position.
    """
    position = np.arange(confidence.shape[1])
    judged = position <= accepted[:, None]
    right = position < accepted[:, None]
    which = np.minimum((confidence * BINS).astype(int), BINS - 1)

    def means(where: np.ndarray) -> dict[str, Any]:
        return {
            "drafts": int(where.sum()),
            "confidence": float(confidence[where].mean()),
            "accepted": float(right[where].mean()),
        }

    groups = [judged & (which == b) for b in range(BINS)]
    bins = [means(group) for group in groups if group.any()]
    columns = [judged & (position == k) for k in position]
    error = sum(b["drafts"] * abs(b["confidence"] - b["accepted"]) for b in bins) / judged.sum()
    return {
        "expected_error": float(error),
        **means(judged),
        "bins": bins,
        "positions": [means(column) for column in columns if column.any()],
    }
