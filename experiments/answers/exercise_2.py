"""Affinity, or recomputing on the idle worker: for which hit lengths is waiting for the owner better?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.simulator.labs import UNIT, QueueLab
from deepinfer_jax.timeline import RequestTimeline
from experiments import batch
from experiments.answers.answer import Answer, Exercise, Prediction
from experiments.answers.tandem import ends

POLICIES = {"affinity": "local_affinity", "recompute": "affinity_with_recompute"}
OBJECTIVES = ("first answer", "last answer", "mean wait")
"""Completion of the first and of the last request; mean time from arrival to the first token."""


def outcome(lab: QueueLab, owners: Sequence[bool]) -> dict[str, float]:
    """The objectives in units when request i goes to the prefix's owner (or to the other worker)."""
    hit = (lab.input_tokens - lab.reused_tokens) / lab.tokens_per_unit
    miss = lab.input_tokens / lab.tokens_per_unit
    free = {True: float(lab.match), False: float(lab.match)}
    prefilled = []
    for owner in owners:
        free[owner] += hit if owner else miss
        prefilled.append(free[owner])
    finished = ends(
        [p + lab.handoff for p in prefilled], [lab.decode] * lab.requests, lab.decode_workers
    )
    mean = sum(prefilled) / len(prefilled)
    return dict(zip(OBJECTIVES, (min(finished), max(finished), mean), strict=True))


def greedy(lab: QueueLab) -> list[bool]:
    """Each request in turn to the worker that would finish its prefill first; the owner on ties."""
    hit, miss = lab.input_tokens - lab.reused_tokens, lab.input_tokens
    queue = [0, 0]
    chosen = []
    for _ in range(lab.requests):
        owner = queue[0] + hit <= queue[1] + miss
        queue[not owner] += hit if owner else miss
        chosen.append(owner)
    return chosen


def best(lab: QueueLab) -> dict[str, float]:
    """The least of each objective over all assignments of requests to workers."""
    every = [outcome(lab, owners) for owners in itertools.product((True, False), repeat=4)]
    return {name: min(one[name] for one in every) for name in OBJECTIVES}


def labs_of(section: Mapping[str, Any]) -> dict[tuple[int, str], QueueLab]:
    """Lab 23 by (reused tokens, rule)."""
    return {
        (tokens, name): QueueLab(reused_tokens=tokens, shared=False, local_policy=policy)
        for tokens, (name, policy) in itertools.product(section["hit_tokens"], POLICIES.items())
    }


def measured(t: RequestTimeline) -> dict[str, float]:
    """The objectives of a run."""
    numbers = (t.finish.min(), t.finish.max(), np.mean(t.first_token - t.arrival))
    return {name: float(n) / UNIT for name, n in zip(OBJECTIVES, numbers, strict=True)}


def affinity_wins(values: Mapping[Any, Mapping[str, float]], objective: str) -> list[int]:
    """Hit lengths at which affinity is at least as good."""
    return [
        tokens
        for tokens, name in values
        if name == "affinity"
        and values[tokens, "affinity"][objective] <= values[tokens, "recompute"][objective]
    ]


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    del seed
    values = {}
    for (tokens, name), lab in labs_of(section).items():
        owners = [True] * lab.requests if name == "affinity" else greedy(lab)
        values[tokens, name] = outcome(lab, owners)
    per = "; ".join(f"{name}: {_tokens(affinity_wins(values, name))}" for name in OBJECTIVES)
    return Prediction(
        "Affinity ends prefill k at match + k (L - hit) / speed. Another worker that recomputes "
        "everything ends at match + L / speed, so the k-th request leaves the owner when "
        "k (L - hit) > L. Affinity should be at least as good at these hit lengths (tokens): "
        f"{per}.",
        values,
    )


def _tokens(found: Sequence[int]) -> str:
    return ", ".join(map(str, found)) or "none"


def _greed(short: Mapping[str, float]) -> str:
    text = "Choosing the earlier prefill one request at a time "
    if not any(short.values()):
        return text + "reaches the least of each objective over all 16 assignments."
    worst = ", ".join(f"{name} by {n:g}" for name, n in short.items() if n)
    return text + f"misses the least over all 16 assignments at worst in {worst} units."


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    del seed
    made = labs_of(section)
    runs = batch.run({key: (lab.cluster(), lab.workload()) for key, lab in made.items()})
    values = {key: measured(run.requests) for key, run in runs.items()}
    agree = all(
        np.isclose(values[key][name], prediction.values[key][name])
        for key in values
        for name in OBJECTIVES
    )
    wins = {name: affinity_wins(values, name) for name in OBJECTIVES}
    optimum = {tokens: best(made[tokens, "affinity"]) for tokens in section["hit_tokens"]}
    short = {
        name: max(values[t, "recompute"][name] - optimum[t][name] for t in optimum)
        for name in OBJECTIVES
    }
    rows = [
        {"hit tokens": tokens}
        | {
            f"{objective}: {name}": values[tokens, name][objective]
            for objective in OBJECTIVES
            for name in POLICIES
        }
        for tokens in section["hit_tokens"]
    ]
    return Answer(
        f"It depends on the objective. First answer: affinity at {_tokens(wins['first answer'])} "
        f"of the hit lengths tried, for the owner serves the first request in any case. Last "
        f"answer: {_tokens(wins['last answer'])}. Mean wait for the first token: "
        f"{_tokens(wins['mean wait'])}. Elsewhere recomputing on the idle worker is better. "
        f"{_greed(short)} "
        + ("Every number is the predicted one." if agree else "THE PREDICTION FAILED."),
        [Table("Assigned time units, two prefill and two decode workers", rows)],
        [
            Plot(
                "exercise_2",
                "Wait for the owner of the prefix, or recompute",
                "Over the tokens of 1,024 that the owner holds. Lines: simulated; rings: "
                "predicted; dashes: the least over all 16 assignments.",
                figure(values, prediction.values, optimum),
            )
        ],
        {
            "agrees": agree,
            "affinity_preferable": wins,
            "greedy_above_optimum": short,
            "values": {f"{t} {name}": v for (t, name), v in values.items()},
        },
    )


def figure(
    values: Mapping[Any, Mapping[str, float]],
    predicted: Mapping[Any, Mapping[str, float]],
    optimum: Mapping[int, Mapping[str, float]],
) -> Figure:
    """One panel per objective over the hit length."""
    made, axes = style.figure(3, width=9.4, height=3.1)
    tokens = list(optimum)
    for ax, objective in zip(axes, OBJECTIVES, strict=True):
        style.title(ax, f"{objective} (units)")
        for index, name in enumerate(POLICIES):
            colour = style.colour(index)
            y = [values[t, name][objective] for t in tokens]
            ring = [predicted[t, name][objective] for t in tokens]
            ax.plot(tokens, y, ".-", color=colour, label=name)
            ax.plot(
                tokens, ring, "o", markersize=8 + 3 * index, markerfacecolor="none", color=colour
            )
        least = [optimum[t][objective] for t in tokens]
        ax.plot(tokens, least, color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1, label="best")
        ax.set_xlabel("reusable tokens")
        ax.set_xticks(tokens[::2])
        ax.set_ylim(0, None)
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(
        handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8,
        labelcolor=style.INK,
    )  # fmt: skip
    return made


EXERCISE = Exercise(
    "If a request may also be recomputed on the idle worker, which hit lengths make affinity "
    "preferable: for the first answer, the last one, the mean wait?",
    predict,
    answer,
)
