"""What the drafter proposes after random prompts, by NeMo's public draft model.

`python -m tests.oracle.drafting` writes tests/testdata/draft_fixture.json again, so that our drafter
is held to these tokens and confidences where no reference is installed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig, RopeConfig
from deepinfer_jax.presets import tiny
from tests.oracle.random_weights import random_parameters

FIXTURE = pathlib.Path(__file__).parents[1] / "testdata" / "draft_fixture.json"
WIDTH = 32  # rows of our compiled prompt
LENGTHS = (5, 20, 32)  # shorter than the window, longer, and all of WIDTH
SEEDS = range(8)
STEADY = 2e-5  # of a confidence; a code that flips moves one by 1e-3


def config() -> ModelConfig:
    """The tiny preset without Engram, a block of 3, two active draft experts.

    With one, NeMo does not norm its weight as the released model does.
    """
    draft = tiny().draft
    assert draft is not None
    return dataclasses.replace(
        tiny(),
        engram=None,
        vision=None,
        rope=RopeConfig(original_max_positions=64),
        draft=dataclasses.replace(draft, block_size=3, markov_rank=8, num_active_experts=2),
    )


def sample(seed: int, length: int) -> tuple[dict[str, Any], np.ndarray]:
    """Weights and a prompt [length] of ids below the noise token's."""
    ids = np.random.default_rng(seed + 1000).integers(0, 63, WIDTH)
    return random_parameters(config(), seed), ids[:length]


def shaken(weights: dict[str, Any], seed: int) -> dict[str, Any]:
    """The weights, each off by a few last bits of float32."""
    rng = np.random.default_rng(seed)
    noise = np.float32(3e-7)
    return jax.tree.map(
        lambda x: x * (1 + noise * rng.standard_normal(x.shape, np.float32)), weights
    )


def draft(weights: dict[str, Any], ids: np.ndarray, rounding: bool) -> tuple[Any, ...]:
    """NeMo's next token, drafts [N] and confidences [N]."""
    from tests.oracle import nemo

    with nemo.rounding(rounding):
        model, drafter = nemo.backbone(config(), weights), nemo.drafter(config(), weights)
        return nemo.drafted(config(), model, drafter, ids)


def case(seed: int, length: int, rounding: bool) -> dict[str, Any] | None:
    """One line of the fixture; None where NeMo's own answer hangs on the last bits of its weights.

    Then a value lies between two codes, and correct implementations part.
    """
    weights, ids = sample(seed, length)
    token, drafts, confidence = draft(weights, ids, rounding)
    for other in range(4 if rounding else 0):
        *_, moved = draft(shaken(weights, other), ids, rounding)
        if np.abs(moved - confidence).max() > STEADY:
            return None
    return {
        "rounding": rounding,
        "seed": seed,
        "length": length,
        "token": token,
        "drafts": drafts.tolist(),
        "confidences": [round(float(x), 6) for x in confidence],
    }


def record() -> dict[str, Any]:
    """NeMo's drafts, rounding on and off."""
    tried = [(s, n, r) for r in (True, False) for s in SEEDS for n in LENGTHS]
    cases = [case(*one) for one in tried]
    return {
        "made_by": "python -m tests.oracle.drafting, with nemo-automodel 0.7.0",
        "config": "tests.oracle.drafting.config",
        "weights": "tests.oracle.random_weights.random_parameters, numpy's default_rng(seed)",
        "prompt": "tests.oracle.drafting.sample, numpy's default_rng(seed + 1000)",
        "left_out_at_a_near_tie": sum(one is None for one in cases),
        "cases": [one for one in cases if one],
    }


if __name__ == "__main__":
    made = record()
    lines = ",\n  ".join(json.dumps(one) for one in made.pop("cases"))
    head = json.dumps(made, indent=1)[:-2]
    FIXTURE.write_text(f'{head},\n "cases": [\n  {lines}\n ]\n}}\n')
