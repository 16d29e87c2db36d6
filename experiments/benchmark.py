"""Measures the engine in two stages apart: prompts only, then decoding of a full batch only.

  python -m experiments.benchmark --config=configs/benchmark.py:smoke
  python -m experiments.benchmark --config=configs/benchmark.py --workdir=runs/benchmark

The prompt window holds prompt steps only (one token is asked). The decode window holds the decode
steps in which every seat was taken. Useful tokens are those committed to requests. The host gap is
the time between a step's results and the next step's start in which the device has nothing to do,
as a share of the window. A workdir gets summary.json and results.jsonl, one line per request with
the time of each token.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import platform
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.statistics import RequestRecord, StepRecord, summarise
from deepinfer_jax.layout import blocks_needed
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import initialise
from deepinfer_jax.report import records
from deepinfer_jax.report.table import quantity, table
from experiments import harness
from experiments.training import store, text

BLOCK_TOKENS = 128


def main(run: harness.Run) -> None:
    settings = run.parameters
    found, lines = measure(settings, run.seed)
    rows = [{"stage": stage, **shown(numbers)} for stage, numbers in found.items()]
    print(table(rows, title=f"{settings['model']}, {settings['concurrency']} requests"))
    if run.workdir:
        summary = {**records.environment(), "machine": machine(), **found}
        records.write_json(run.workdir / "summary.json", summary)
        records.write_jsonl(run.workdir / "results.jsonl", lines, len(lines))


def measure(
    settings: dict[str, Any], seed: int
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """An engine with these settings: the numbers of both windows, and a line for each request.

    Raises:
      ValueError: a setting that no engine takes, or a window without a step.
    """
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    steps: list[StepRecord] = []
    llm, prompts = prepare(settings, seed, steps)
    llm.warm_up()
    seats, found, lines = settings["concurrency"], {}, []
    for stage, answer in (("prompt", 1), ("decode", settings["answer"])):
        wish = SamplingParams(
            temperature=settings["temperature"], max_tokens=answer, ignore_eos=True, seed=seed
        )
        serve(llm, prompts[:seats], wish)  # the first round is not measured
        steps.clear()
        with harness.Progress(len(prompts), f"{stage} stage") as bar:
            for at in range(0, len(prompts), seats):
                requests = serve(llm, prompts[at : at + seats], wish)
                lines += [{"stage": stage, **dataclasses.asdict(r)} for r in requests]
                bar.step(len(requests))
        found[stage] = window(steps, stage, seats)
    return found, lines


def machine() -> dict[str, Any]:
    """The processor by its name, and the cores that this process may use."""
    info = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {"processor": names[0] if names else platform.processor(), "cores": cores()}


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(
    settings: dict[str, Any], seed: int, steps: list[StepRecord]
) -> tuple[LLM, list[list[int]]]:
    """The engine, whose steps are appended to `steps`, and all prompts."""
    count, seats = settings["requests"], settings["concurrency"]
    if not 0 < seats <= count or count % seats:
        raise ValueError(
            f"{count} requests, {seats} at a time: give whole rounds, so that every seat is taken"
        )
    model, params, prompts = model_and_prompts(settings, seed)
    return LLM(params, model, **engine_of(settings), record=steps.append), prompts


def model_and_prompts(
    settings: dict[str, Any], seed: int
) -> tuple[ModelConfig, Any, list[list[int]]]:
    """The model, its weights, and prompts: held-out text of a trained one, else random ids."""
    model: ModelConfig = getattr(presets, settings["model"])()
    count, rng = settings["requests"], np.random.default_rng(seed)
    if settings["checkpoint"]:
        params, tokenizer = store.load(pathlib.Path(settings["checkpoint"]), model)
        _, held_out = text.sources()
        stream = text.encode(tokenizer, held_out)
        prompts = text.batch(stream, count, settings["prompt"], rng)
    else:
        params = jax.jit(lambda key: initialise(model_parameters(model), key))(jax.random.key(seed))
        prompts = rng.integers(3, model.vocab_size, (count, settings["prompt"]))
    return model, params, prompts.tolist()


def engine_of(settings: dict[str, Any]) -> dict[str, Any]:
    """An engine of just the asked size, and its buckets: one of each kind."""
    cache = CacheConfig(block_tokens=BLOCK_TOKENS, nextn=settings["drafts"])
    seats, longest = settings["concurrency"], settings["prompt"] + settings["answer"]
    config = EngineConfig(
        cache=cache,
        max_model_len=longest,
        max_num_seqs=seats,
        max_num_batched_tokens=max(longest, seats * max(settings["prompt"], cache.nextn + 1)),
        overlap=settings["overlap"],
        num_blocks=1 + 2 * seats * blocks_needed(longest + 4 * (cache.nextn + 1), cache),
    )
    sizes = Buckets(
        sequences=(seats,),
        prompt=tuple(sorted({settings["prompt"], longest})),
        blocks=(blocks_needed(config.runtime_max_len, cache),),
    )
    return {"config": config, "buckets": sizes, "format": settings["format"]}


def serve(llm: LLM, prompts: Sequence[list[int]], wish: SamplingParams) -> list[RequestRecord]:
    """Answer a group of prompts; when each of its tokens was known."""
    began = time.perf_counter()
    made = [RequestRecord(began, len(prompt)) for prompt in prompts]
    for news in llm.generate(list(prompts), wish, stream=True):
        made[news.prompt].commit(time.perf_counter(), len(news.tokens))
    return made


def window(steps: Sequence[StepRecord], stage: str, seats: int) -> dict[str, Any]:
    """Numbers of the stage's own steps, in seconds; runs of neighbouring steps are one stretch."""
    chosen = [s.is_prompt if stage == "prompt" else _full(s, seats) for s in steps]
    stretches = [
        [step for _, step in run]
        for kept, run in itertools.groupby(zip(chosen, steps, strict=True), key=lambda x: x[0])
        if kept
    ]
    inside = [step for stretch in stretches for step in stretch]
    if not inside:
        raise ValueError(
            f"the {stage} window has no step: every seat must be taken in one, so ask more tokens"
        )
    seconds = sum(stretch[-1].end - stretch[0].start for stretch in stretches)
    gaps = sum(
        max(0.0, two.start - one.end)
        for stretch in stretches
        for one, two in itertools.pairwise(stretch)
    )
    made, useful = summarise(inside), sum(s.useful for s in inside)
    return {
        "seconds": seconds,
        "steps": len(inside),
        "rows_per_second": sum(s.rows for s in inside) / seconds,
        "useful_tokens": useful,
        "useful_per_second": useful / seconds,
        "tau": made.tau,
        "useful_tau": made.useful_tau,
        "survival": made.survival,
        "host_gap": gaps / seconds,
    }


def _full(step: StepRecord, seats: int) -> bool:
    return not step.is_prompt and step.requests == seats == step.running


def shown(numbers: dict[str, Any]) -> dict[str, str]:
    """One line of the printed table."""
    tau = numbers["useful_tau"]
    return {
        "steps": str(numbers["steps"]),
        "rows/s": quantity(numbers["rows_per_second"]),
        "useful tokens/s": quantity(numbers["useful_per_second"]),
        "tokens per request and step": "" if tau is None else f"{tau:.2f}",
        "host gap": quantity(numbers["host_gap"], "%"),
    }


if __name__ == "__main__":
    harness.run(main, config="configs/benchmark.py")
