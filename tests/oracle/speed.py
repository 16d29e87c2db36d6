"""Our steps against mlx-lm's and NeMo's, one model and one set of weights, in turns in one process.

The `small` preset without Engram and drafter, which mlx-lm lacks; weights and rows in float32. NeMo
keeps no cache, so only prompts are compared with it. Each figure is the best of its repeats.

    python -m tests.oracle.speed
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import torch

from deepinfer_jax import presets
from deepinfer_jax.config import ModelConfig
from experiments.benchmark_model import best, memory_of, step
from tests.oracle import mlx, nemo
from tests.oracle import ours as reference
from tests.oracle.models import without_extras
from tests.oracle.random_weights import random_parameters

CONTEXT = 512  # tokens before a decode step


def ours(
    config: ModelConfig, params: Any, prompt: np.ndarray, rows: np.ndarray
) -> Callable[[], Any]:
    """A step on `rows` [S, Q] behind `prompt` [S, P], on a paged memory; logits of the last row."""
    sequences, before = prompt.shape
    none = jnp.zeros((sequences, 0), jnp.int32)
    state = {"memory": memory_of(config, sequences, before + rows.shape[1], "values")}
    zero = jnp.zeros(sequences, jnp.int32)
    if before:
        state["memory"] = step(params, state["memory"], jnp.asarray(prompt), zero, none, config)[2]

    def run() -> jax.Array:
        made = step(params, state["memory"], jnp.asarray(rows), zero + before, none, config)
        state["memory"] = made[2]
        return made[0]

    return run


def mlx_step(model: Any, prompt: np.ndarray, rows: np.ndarray) -> Callable[[], Any]:
    """The same step of mlx-lm; the cache is rolled back before each."""
    cache = model.make_cache()
    if prompt.shape[1]:
        mx.eval(model(mx.array(prompt), cache))
        mx.eval([c.state for c in cache if hasattr(c, "state")])

    def run() -> np.ndarray:
        return np.array(model(mx.array(rows), mlx.snapshot(cache))[:, -1])

    return run


@torch.no_grad()
def _nemo(model: Any, rows: torch.Tensor) -> np.ndarray:
    return model(rows).logits[:, -1].numpy()


def apart(
    config: ModelConfig, weights: Any, theirs: Any, torch_model: Any, ids: np.ndarray
) -> dict[str, float]:
    """Largest differences of logits on a prompt, rounding off: the three compute the same thing."""
    with mlx.rounding(False), nemo.rounding(False):
        expected = reference.prompt(weights, config, ids, rounding=False)[0]
        found = {
            "mlx": mlx.in_chunks(theirs, ids, []),
            "nemo": nemo.logits(torch_model, ids),
        }
    return {k: float(np.abs(v - expected).max()) for k, v in found.items()}


def main() -> None:
    """Print one JSON line per step: seconds of each, and how many times ours is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", default="1x512,8x128,1x1,8x1", help="sequences x rows, ...")
    asked = parser.parse_args()
    config = without_extras(presets.small())
    weights = random_parameters(config, 0)
    params = jax.tree.map(jnp.asarray, weights)
    theirs, torch_model = mlx.backbone(config, weights), nemo.backbone(config, weights)
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "torch": torch.get_num_threads()}))
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab_size, 48, np.int32)
    print(json.dumps({"logits_apart": apart(config, weights, theirs, torch_model, ids)}))
    for shape in asked.steps.split(","):
        sequences, length = map(int, shape.split("x"))
        before = CONTEXT if length == 1 else 0
        ids = rng.integers(3, config.vocab_size, (sequences, before + length), np.int32)
        prompt, rows = ids[:, :before], ids[:, before:]
        work = {
            "ours": ours(config, params, prompt, rows),
            "mlx": mlx_step(theirs, prompt, rows),
        }
        if not before:
            work["nemo"] = functools.partial(_nemo, torch_model, torch.from_numpy(rows.astype(int)))
        seconds = best(work, asked.repeats)
        line = {"sequences": sequences, "rows": length, "context": before}
        line |= {f"{k}_ms": round(1e3 * v, 2) for k, v in seconds.items()}
        line |= {f"over_{k}": round(seconds[k] / seconds["ours"], 2) for k in work if k != "ours"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
