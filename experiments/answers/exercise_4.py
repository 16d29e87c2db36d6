"""Equal shares of requests with a hit, unequal work: why capacity needs the share of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax import metrics
from deepinfer_jax.cost.capacity import prefill_gpus
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, TICKS_PER_SECOND, StepCost
from deepinfer_jax.policy.prefix import BLOCK_TOKENS
from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.traces import Trace, offsets, plain
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.workload import workload
from experiments import batch
from experiments.answers.answer import Answer, Exercise, Prediction

AGREED = 0.25
"""Largest relative error of a mean wait that still agrees: waits of one run scatter by a tenth."""


def trace(section: Mapping[str, Any], blocks: int, seed: int) -> Trace:
    """Poisson arrivals; exactly the given share of prompts begins with `blocks` known blocks."""
    generator = np.random.default_rng(seed)
    count, length = section["requests"], section["input_tokens"]
    arrival = np.cumsum(generator.exponential(1 / section["rate"], count)) * TICKS_PER_SECOND
    hits = generator.permutation(count) < round(section["request_hits"] * count)
    made = plain("half of the prompts", arrival, np.full(count, length), np.ones(count, int))
    full = length // BLOCK_TOKENS
    private = 10**6 + full * np.arange(count)  # ids of blocks that no other prompt has
    first = np.stack([np.where(hits, 0, private), private + blocks], axis=1)
    return dataclasses.replace(
        made,
        block_tokens=BLOCK_TOKENS,
        run_first=first.reshape(-1),
        run_count=np.tile([blocks, full - blocks], count),
        run_offsets=offsets(np.full(count, 2)),
    )


def cluster(section: Mapping[str, Any], warm: int) -> ClusterConfig:
    """One prompt server, one request at a time, a boundless shared cache that is free to read."""
    token = round(FEMTOSECONDS_PER_SECOND / section["tokens_per_second"])
    return ClusterConfig(
        modes=(Mode.NORMAL,),
        cost=StepCost(0, token, 0, 0, 0, 0, [[1, 0, 0]], 0, 0),
        cache_scope="shared",
        warm_requests=(warm,),
        batch_requests=1,
        chunk_multiple=FOREVER,
    )


def predicted(section: Mapping[str, Any], blocks: int) -> dict[str, float]:
    """Load and mean wait of the server by Pollaczek and Khinchine, and two capacity estimates."""
    length, speed, rate = (section[k] for k in ("input_tokens", "tokens_per_second", "rate"))
    share = section["request_hits"]
    services = np.asarray([length - blocks * BLOCK_TOKENS, length]) / speed
    weights = np.asarray([share, 1 - share])
    load, square = rate * weights @ services, weights @ services**2
    return {
        "token hits": share * blocks * BLOCK_TOKENS / length,
        "by requests": rate * length * (1 - share) / speed,
        "by tokens": float(load),
        "wait": float(rate * square / (2 * (1 - load))),
    }


def measured(run: Trajectory) -> dict[str, float]:
    """The same of a run; `by tokens` is the share of time the server worked."""
    t = run.requests
    hits = metrics.hit_rates(t, np.ones(len(t.arrival), bool))
    return {
        "request hits": hits["request_hit_fraction"],
        "token hits": hits["token_hit_fraction"],
        "by tokens": float(run.busy.sum() / run.end),
        "wait": float(np.mean(t.prefill_start - t.matched)) / TICKS_PER_SECOND,
    }


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    del seed
    values = {blocks: predicted(section, blocks) for blocks in section["hit_blocks"]}
    few, many = values[min(values)], values[max(values)]
    return Prediction(
        f"Every workload hits in {section['request_hits']:.0%} of its requests. Read as the share "
        f"of tokens that would ask for {few['by requests']:.2f} busy servers each time. Counting "
        f"uncached tokens asks for {few['by tokens']:.2f} when a hit is {min(values)} block and "
        f"for {many['by tokens']:.2f} when it is {max(values)}, and the mean wait in front of one "
        f"server should be {few['wait']:.2f} s and {many['wait']:.2f} s.",
        values,
    )


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    cases = {}
    for blocks in section["hit_blocks"]:
        made = trace(section, blocks, seed)
        warm = int(np.flatnonzero(made.run_first[::2] == 0)[0])
        cases[blocks] = cluster(section, warm), workload(made)
    values = {blocks: measured(run) for blocks, run in batch.run(cases).items()}
    wanted = prediction.values
    rows = [
        {
            "hit blocks": blocks,
            "requests hit": f"{one['request hits']:.1%}",
            "tokens hit": f"{one['token hits']:.1%}",
            "servers by requests": f"{wanted[blocks]['by requests']:.3f}",
            "by tokens": f"{wanted[blocks]['by tokens']:.3f}",
            "busy": f"{one['by tokens']:.3f}",
            "wait, predicted": f"{wanted[blocks]['wait']:.3f}",
            "wait": f"{one['wait']:.3f}",
        }
        for blocks, one in values.items()
    ]
    a, b = min(values), max(values)
    gpus = [_gpus(section, values[k]["token hits"]) for k in (a, b)]
    largest = max(abs(one["wait"] / wanted[k]["wait"] - 1) for k, one in values.items())
    return Answer(
        f"Both extremes hit in {values[a]['request hits']:.0%} of the requests. With hits of {a} "
        f"block {values[a]['token hits']:.1%} of the tokens were reused, the server worked "
        f"{values[a]['by tokens']:.1%} of the time and a mean request waited "
        f"{values[a]['wait']:.2f} s; with {b} blocks it is {values[b]['token hits']:.1%}, "
        f"{values[b]['by tokens']:.1%} and {values[b]['wait']:.2f} s. For a hundred times this "
        f"rate at 80 % utilisation the capacity formula gives {gpus[0]} and {gpus[1]} servers by "
        f"tokens, and {_gpus(section, values[a]['request hits'])} for both if h is the share of "
        "requests. The measurement to use is uncached prompt tokens per second, 1 - (tokens "
        "skipped / tokens), not the share of requests with a hit. Predicted waits are met within "
        f"{largest:.0%}.",
        [Table("One prompt server, the same arrivals in every row; waits in seconds", rows)],
        [
            Plot(
                "exercise_4",
                "The same share of requests hits in every workload",
                "Left: servers kept busy. Right: mean wait for the server.",
                figure(values, wanted),
            )
        ],
        {"agrees": largest < AGREED, "values": values, "largest_error_of_wait": largest},
    )


def _gpus(section: Mapping[str, Any], share: float) -> int:
    length, speed = section["input_tokens"], section["tokens_per_second"]
    return prefill_gpus(100 * section["rate"], length, share, speed, 0.8)


def figure(values: Mapping[int, Mapping[str, float]], wanted: Mapping[int, Any]) -> Figure:
    """Busy servers and mean waits over the length of a hit."""
    made, (left, right) = style.figure(2, width=9.4, height=3.0)
    blocks = list(values)
    style.title(left, "Busy servers")
    style.title(right, "Mean wait (s)")
    dash = (0, (4, 3))
    lines = (
        (left, "by requests", "if h counts requests", style.colour(1)),
        (left, "by tokens", "if h counts tokens", style.colour(0)),
        (right, "wait", "Pollaczek-Khinchine", style.colour(0)),
    )
    for ax, name, label, colour in lines:
        y = [wanted[b][name] for b in blocks]
        ax.plot(blocks, y, color=colour, linestyle=dash, label=label)
    for ax, name in ((left, "by tokens"), (right, "wait")):
        y = [values[b][name] for b in blocks]
        ax.plot(blocks, y, "o", color=style.colour(0), label="simulated")
        ax.set_xlabel("blocks of 8 that a hit reuses")
        ax.set_ylim(0, None)
        ax.set_xticks(blocks)
        style.legend(ax, loc="lower left")
    return made


EXERCISE = Exercise(
    "Two workloads with the same share of requests that hit, and different uncached work: what "
    "must a capacity estimate measure instead?",
    predict,
    answer,
)
