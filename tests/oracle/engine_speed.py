"""Steps of our engine against mlx-lm's model, one set of weights, in turns in one process.

The `small` preset without Engram and drafter, which mlx-lm lacks; weights in float32. Ours is a whole
step of the engine, from its plan to its committed tokens; mlx-lm's is its model alone, without a
scheduler or sampling. Each figure is the best of its repeats.

    taskset -c 0 python -m tests.oracle.engine_speed
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from deepinfer_jax import presets
from experiments.benchmark_engine import CONTEXT, cadence, make_device, serve, shape
from tests.oracle import mlx
from tests.oracle.models import without_extras
from tests.oracle.random_weights import random_parameters
from tests.oracle.speed import mlx_step


def compare(step: str, repeats: int, config: Any, params: Any, theirs: Any) -> dict[str, Any]:
    """Milliseconds of both, and how many times the engine is faster."""
    seats, length, is_prompt = shape(step)
    before = 0 if is_prompt else CONTEXT
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab_size, (seats, before + length), np.int32)
    run = mlx_step(theirs, ids[:, :before], ids[:, before:])
    device = make_device(config, seats, before or length, params)
    seconds = {"engine": float("inf"), "mlx": float("inf")}
    for turn in range(repeats + 1):  # the first compiles
        began = time.perf_counter()
        run()
        other = time.perf_counter() - began
        steps = serve(device, seats, before or length, 1 if is_prompt else 12, overlap=True)
        if is_prompt:
            ours = steps[0].end - steps[0].start
        else:
            ours = cadence([s for s in steps if not s.is_prompt and s.requests == seats])[0]
        if turn:
            seconds["engine"] = min(seconds["engine"], ours)
            seconds["mlx"] = min(seconds["mlx"], other)
    line = {f"{name}_ms": round(1e3 * best, 2) for name, best in seconds.items()}
    return {"step": step, **line, "times": round(seconds["mlx"] / seconds["engine"], 2)}


def main() -> None:
    """Print one JSON line per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", default="1,8,1x512", help="requests, or requests x tokens")
    asked = parser.parse_args()
    flags.FLAGS(sys.argv[:1])
    config = without_extras(presets.small())
    weights = random_parameters(config, 0)
    params, theirs = jax.tree.map(jnp.asarray, weights), mlx.backbone(config, weights)
    print(json.dumps({"cores": len(os.sched_getaffinity(0))}))
    for step in asked.steps.split(","):
        print(json.dumps(compare(step, asked.repeats, config, params, theirs)), flush=True)


if __name__ == "__main__":
    main()
