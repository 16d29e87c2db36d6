"""Speed of the engine on this machine: its steps against the bare model's, and its host's share.

  python -m experiments.benchmark_engine --steps=1x512,8x128,1,8
  taskset -c 0 python -m experiments.benchmark_engine --workdir=runs/engine    # one core

A step "8x128" is a prompt step of 8 prompts of 128 tokens, "8" a decode step of 8 requests behind
512 tokens, without drafts unless --drafts asks for them. The engine's figure is its best step, from
the call that plans it to its committed tokens; the bare model's is `benchmark_model`'s, taken just
after, with the machine's matmul and read rates. Shares count the bare model's work only, so that
whatever else the engine does shows. The host's share is the time per step of the loop in turn in
which the device waits for the host; the overlapped loop hides it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.loops import Engine, land
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.layout import blocks_needed
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import initialise
from deepinfer_jax.report import records
from deepinfer_jax.report.table import quantity, table
from experiments import benchmark, benchmark_model, harness
from experiments.sweep import kept_programs

MODEL = flags.DEFINE_enum("model", "small", ["small", "tiny"], "The preset, with random weights.")
STEPS = flags.DEFINE_list("steps", ["1x512", "8x128", "1", "8"], "Requests x tokens, or requests.")
FORMAT = flags.DEFINE_enum("format", "values", ["values", "bytes"], "Of the memory.")
DRAFTS = flags.DEFINE_integer("drafts", 0, "Drafts that a decode step verifies.")
TURNS = flags.DEFINE_integer("turns", 5, "Prompt steps, and twice as many decode steps.")
CONTEXT = 512  # tokens before a decode step


def main(run: harness.Run) -> None:
    for step in STEPS.value:
        shape(step)  # what is wrong is said before anything is measured
    with kept_programs():
        found = [measure(step) for step in STEPS.value]
    print(table([shown(line) for line in found], title=f"{MODEL.value}, {DRAFTS.value} drafts"))
    if run.workdir:
        about = {**records.environment(), "machine": benchmark.machine()}
        records.write_json(run.workdir / "summary.json", {**about, "steps": found})


def shape(step: str) -> tuple[int, int, bool]:
    """(requests, tokens of each, whether it is a prompt step) of "8x128" or "8".

    Raises:
      ValueError: it is neither.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", step):
        raise ValueError(f"--steps has {step!r}: write requests, or requests x tokens")
    seats, _, length = step.partition("x")
    return int(seats), int(length or 1), bool(length)


def measure(step: str) -> dict[str, Any]:
    """One shape of step: of both loops, and of the bare model, in milliseconds; and their shares."""
    seats, length, is_prompt = shape(step)
    model: ModelConfig = getattr(presets, MODEL.value)()
    before = 0 if is_prompt else CONTEXT
    device = make_device(model, seats, before or length)
    serve(device, seats, before or length, 2, overlap=False)  # compiles
    line: dict[str, Any] = {"step": step, "drafts": 0 if is_prompt else DRAFTS.value}
    if is_prompt:
        made = [serve(device, seats, length, 1, overlap=False)[0] for _ in range(TURNS.value)]
        line["in_turn_ms"] = 1e3 * min(step.end - step.start for step in made)
    else:
        for overlap, name in ((False, "in_turn"), (True, "overlapped")):
            made = serve(device, seats, CONTEXT, answer_tokens(), overlap)
            seconds, gap = cadence([s for s in made if not s.is_prompt and s.requests == seats])
            line |= {f"{name}_ms": 1e3 * seconds, f"{name}_gap_ms": 1e3 * gap}
        line["host_share"] = line["in_turn_gap_ms"] / line["in_turn_ms"]
    bare = benchmark_model.measure(model, seats, length, before, FORMAT.value, 2 * TURNS.value)
    ratio = bare["milliseconds"] / min(line["in_turn_ms"], line.get("overlapped_ms", np.inf))
    shares = {name: bare[name] * ratio for name in ("share_of_matmul", "share_of_read")}
    return {**line, **shares, "bare": bare}


def cadence(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Seconds from step to step at best, and the median time that the device waits in between.

    The first step is left out: the one before it is a prompt.
    """
    pairs = list(itertools.pairwise(steps))
    gaps = [max(0.0, two.start - one.end) for one, two in pairs]
    return min(two.end - one.end for one, two in pairs), float(np.median(gaps))


def answer_tokens() -> int:
    """Enough for the steps of a decode run, whatever is accepted."""
    return 2 * (TURNS.value + 2) * (DRAFTS.value + 1)


def make_device(model: ModelConfig, seats: int, context: int, params: Any = None) -> Device:
    """A device of just this size, whose prompts go side by side through one program.

    Args:
      params: weights; None: random ones.
    """
    cache = CacheConfig(nextn=DRAFTS.value)
    longest = context + answer_tokens()
    config = EngineConfig(
        cache=cache,
        max_model_len=longest,
        max_num_seqs=seats,
        max_num_batched_tokens=max(longest, seats * context),
        num_blocks=1 + 2 * seats * blocks_needed(longest + 4 * (cache.nextn + 1), cache),
    )
    most = config.runtime_max_len
    sizes = Buckets(
        sequences=(seats,),
        prompt=tuple(sorted({context, longest})),
        blocks=tuple(sorted({blocks_needed(context, cache), blocks_needed(most, cache)})),
        prompts=seats,
    )
    if params is None:
        params = jax.jit(lambda key: initialise(model_parameters(model), key))(jax.random.key(0))
    return Device(params, model, config, buckets=sizes, format=FORMAT.value)


def serve(device: Device, seats: int, context: int, answer: int, overlap: bool) -> list[StepRecord]:
    """The steps that answer one batch of prompts: the prompt step, then decode steps."""
    steps: list[StepRecord] = []
    config = dataclasses.replace(device.config, overlap=overlap)
    scheduler = Scheduler(config, device.model.vocab_size, lookback=reach(device.model))
    loop = Engine(scheduler, device, steps.append)
    rng, wish = np.random.default_rng(0), SamplingParams(max_tokens=answer, ignore_eos=True)
    for number in range(seats):
        prompt = rng.integers(3, device.model.vocab_size, context).tolist()
        scheduler.add(Request(number, prompt, max_tokens=answer, sampling=Answer(wish, number)))
    while scheduler.unfinished:
        loop.call()
    land(loop)
    return steps


def shown(line: dict[str, Any]) -> dict[str, str]:
    """One line of the printed table."""
    decode = line.get("overlapped_ms")
    return {
        "step": line["step"],
        "in turn": quantity(line["in_turn_ms"] / 1e3, "s"),
        "overlapped": quantity(decode / 1e3, "s") if decode else "",
        "host's share": quantity(line["host_share"], "%") if decode else "",
        "bare model": quantity(line["bare"]["milliseconds"] / 1e3, "s"),
        "of matmul rate": f"{line['share_of_matmul']:.2f} (bare {line['bare']['share_of_matmul']:.2f})",
        "of read rate": f"{line['share_of_read']:.2f} (bare {line['bare']['share_of_read']:.2f})",
    }


if __name__ == "__main__":
    harness.run(main, config=None)
