"""Acceptance changed at one operating point: may the frontier change, and what must be counted?"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from deepinfer_jax.cost import acceptance as tau_of
from deepinfer_jax.cost.frontier import OperatingPoint, frontier
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, StepCost
from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.tokens import token_times
from deepinfer_jax.simulator.traces import plain
from deepinfer_jax.simulator.workload import workload
from experiments import batch
from experiments.answers.answer import Answer, Exercise, Prediction
from experiments.labs import RECORDS_25

NEXTN = 3
BASE = Fraction(13, 4)
"""The chapter's tau of every point: 1 + 3 * 0.75."""


def survivors(changed: int, tau: Any) -> list[int]:
    """Requests of the non-dominated points when one point has another tau than `BASE`."""
    points = [
        OperatingPoint(r, sps, float(tau if r == changed else BASE))
        for r, sps in RECORDS_25.items()
    ]
    return [p.requests for p in frontier(points)]


def ranges(changed: int) -> list[tuple[Fraction, Fraction, list[int]]]:
    """(from, to, non-dominated) over tau in [1, 4] of one point; exact, ends left out.

    The set can only change where the point's user rate or device rate equals another's.
    """
    own = RECORDS_25[changed]
    ties = {Fraction(1), Fraction(NEXTN + 1)}
    for requests, sps in RECORDS_25.items():
        if requests != changed:
            ties |= {Fraction(sps, own) * BASE, Fraction(sps * requests, own * changed) * BASE}
    edges = sorted(t for t in ties if 1 <= t <= NEXTN + 1)
    found: list[tuple[Fraction, Fraction, list[int]]] = []
    for low, high in itertools.pairwise(edges):
        kept = survivors(changed, (low + high) / 2)
        if found and found[-1][2] == kept:
            found[-1] = (found[-1][0], high, kept)
        else:
            found.append((low, high, kept))
    return found


def spread(conditional: float) -> float:
    """Standard deviation of the tokens of one step whose drafts are accepted independently."""
    survival = tau_of.survival_from_conditionals([conditional] * NEXTN)
    chances = -np.diff([1.0, *survival, 0.0])
    tokens = 1 + np.arange(NEXTN + 1)
    return math.sqrt(float(chances @ tokens**2 - (chances @ tokens) ** 2))


def first_edge(
    changed: int, every: Mapping[int, list[tuple[Fraction, Fraction, list[int]]]]
) -> tuple[Fraction, list[int]]:
    """The least tau above `BASE` from which on the set is another, and that set.

    Raises:
      ValueError: no acceptance of this point makes it another.
    """
    base = survivors(changed, BASE)

    def edges(requests: int) -> list[tuple[Fraction, list[int]]]:
        return [(low, kept) for low, _, kept in every[requests] if low >= BASE and kept != base]

    if changed not in every or not edges(changed):
        able = [str(r) for r in every if edges(r)]
        raise ValueError(
            f"changed_requests={changed}: no better acceptance of that point changes the set; "
            f"take {' or '.join(able)}"
        )
    return min(edges(changed), key=lambda edge: edge[0])


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    del seed
    changed, conditional = section["changed_requests"], section["conditional_acceptance"]
    tau = tau_of.tau_from_constant_conditional(conditional, NEXTN)
    every = {requests: ranges(requests) for requests in RECORDS_25}
    base = survivors(changed, BASE)
    edge, beyond = first_edge(changed, every)
    if tau == float(edge):
        raise ValueError(f"conditional_acceptance={conditional} lies on the edge; take another")
    steps = math.ceil((1.96 * spread(conditional) / (tau - float(edge))) ** 2)
    return Prediction(
        f"Yes. With tau {float(BASE)} everywhere {base} are not dominated. The point at {changed} "
        f"requests runs at {RECORDS_25[changed]} steps/s; above tau {edge} = {float(edge):.4f} it "
        f"beats a point on one axis and the set becomes {beyond}. A conditional "
        f"acceptance of {conditional} at each of {NEXTN} positions gives tau {tau:.4f}. Its "
        f"tokens per step scatter by {spread(conditional):.3f}, so after about {steps} request-steps "
        "half of a 95 % interval is as wide as its distance from the edge.",
        {
            "tau": tau,
            "edge": float(edge),
            "request_steps": steps,
            "ranges": every,
            "sets": {"as before": base, "changed": survivors(changed, tau)},
        },
    )


def cluster(section: Mapping[str, Any], conditional: float, seed: int) -> ClusterConfig:
    """The point's decode group: a fixed step time, as many slots as requests."""
    requests = section["changed_requests"]
    step = round(FEMTOSECONDS_PER_SECOND / RECORDS_25[requests])
    return ClusterConfig(
        modes=(Mode.NORMAL,),
        slots=requests,
        cost=StepCost(0, 1, 0, 0, 0, 0, [[step, 0, 0]], 0, 0),
        nextn=NEXTN,
        acceptance=(conditional,) * NEXTN,
        token_times=True,
        seed=seed,
    )


def counts(section: Mapping[str, Any], run: Any, longer: Any, made: ClusterConfig) -> Any:
    """`MeasuredAcceptance` of a run.

    `longer` is the run with the same draws and answers `NEXTN` tokens longer: what its requests had
    when they had made as many steps is what the last step released before the answer's end cut it.
    """
    committed, steps, released = [], [], []
    pieces = [np.split(t, s[1:-1]) for t, s in (token_times(r, made) for r in (run, longer))]
    for short, long in zip(*pieces, strict=True):
        ends, later = np.unique(short[1:]), np.unique(long[1:])
        committed.append(len(short) - 1)
        steps.append(len(ends))
        released.append(int(np.sum(long[1:] <= later[len(ends) - 1])))
    return tau_of.measured_tokens_per_step(committed, steps, released)


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    requests, tokens = section["requests"], section["output_tokens"]
    alike = np.zeros(requests, np.int64)
    loads = [
        workload(plain("alike", alike, alike + 1, alike + 1 + n)) for n in (tokens, tokens + NEXTN)
    ]
    base = tau_of.constant_conditional_from_acceptance_length(float(BASE), NEXTN)
    clusters = {
        "as before": cluster(section, base, seed),
        "changed": cluster(section, section["conditional_acceptance"], seed),
    }
    cases = {(name, i): (c, load) for name, c in clusters.items() for i, load in enumerate(loads)}
    runs = batch.run(cases)
    found = {name: counts(section, runs[name, 0], runs[name, 1], c) for name, c in clusters.items()}
    changed = section["changed_requests"]
    sets = {name: survivors(changed, one.unclipped_tau) for name, one in found.items()}
    one, edge = found["changed"], prediction.values["edge"]
    moves = sets["as before"] != sets["changed"]
    verdict = (
        f"Yes: the set goes from {sets['as before']} to {sets['changed']}."
        if moves
        else f"It may, but at this acceptance the set stays {sets['changed']}."
    )
    sure = abs(one.unclipped_tau - edge) > one.half_width
    agree = not sure or sets == prediction.values["sets"]
    rows = [
        {
            "case": name,
            "tau released": f"{m.unclipped_tau:.4f} ± {m.half_width:.4f}",
            "tau kept": f"{m.tau:.4f}",
            "tokens kept": m.tokens,
            "request-steps": m.request_steps,
            "cut requests": m.clipped_requests,
            "cut tokens": m.clipped_tokens,
            "not dominated": " ".join(map(str, sets[name])),
        }
        for name, m in found.items()
    ]
    return Answer(
        f"{verdict} Counts of the changed point: {one.tokens:,} tokens kept over "
        f"{one.request_steps:,} request-steps, the last step of every request counted and its "
        f"surplus not: tau {one.tau:.4f}. The end of an "
        f"answer cut {one.clipped_tokens:,} tokens in {one.clipped_requests:,} of "
        f"{one.requests:,} requests; with them tau is {one.unclipped_tau:.4f} ± "
        f"{one.half_width:.4f} (predicted {prediction.values['tau']:.4f}), a property of the "
        "drafts; without them it is one of the workload too, and shorter answers lower it. Leaving "
        "the last step out instead would bias it, because that step is chosen by its tokens. The "
        f"edge is {edge:.4f}: this sample {'decides' if sure else 'does not decide'} on which "
        "side the point lies. " + ("" if agree else "THE PREDICTION FAILED."),
        [
            Table("The changed point, before and after", rows),
            Table(
                "Which tau of one point changes the set", range_rows(prediction.values["ranges"])
            ),
        ],
        [
            Plot(
                "exercise_5",
                "One point's tau and the non-dominated set",
                "Left: the records; the arrow moves one point. Right: what each point's own tau "
                "does to the set while the others stay at 3.25; dots: simulated.",
                figure(changed, found, prediction.values["ranges"]),
            )
        ],
        {
            "agrees": agree,
            "sets": sets,
            "edge": edge,
            **{k: dataclasses.asdict(v) for k, v in found.items()},
        },
    )


def range_rows(every: Mapping[int, Any]) -> list[dict[str, str]]:
    """The ranges as a table."""
    return [
        {"requests": str(r), "tau": f"{float(low):.4f} to {float(high):.4f}", "set": str(kept)}
        for r, found in every.items()
        for low, high, kept in found
    ]


def figure(changed: int, found: Mapping[str, Any], every: Mapping[int, Any]) -> Figure:
    """The records with the moved point; strips of tau coloured by what happens to the set."""
    made, (left, right) = style.figure(2, width=9.4, height=3.4)
    kept = survivors(changed, found["changed"].unclipped_tau)
    for requests, sps in RECORDS_25.items():
        colour = style.colour(0) if requests in kept else style.colour(7)
        x, y = sps * float(BASE), sps * requests * float(BASE)
        if requests == changed:
            moved = found["changed"].unclipped_tau / float(BASE)
            arrow = {"arrowstyle": "->", "color": style.colour(1), "lw": 1.4}
            left.annotate("", (x * moved, y * moved), (x, y), arrowprops=arrow)
            left.plot(x, y, "o", markerfacecolor="none", color=style.colour(7))
            x, y, colour = x * moved, y * moved, style.colour(1)
        left.plot(x, y, "o", color=colour)
        left.annotate(f"{requests}", (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
    left.set_xlabel("tokens/s of one user")
    left.set_ylabel("tokens/s of one GPU")
    left.margins(x=0.12, y=0.12)
    style.dress(right, "x")
    colours = {"as before": style.GRID, "joins": style.colour(2), "leaves": style.colour(4),
               "drives others out": style.colour(3)}  # fmt: skip
    for row, (requests, pieces) in enumerate(every.items()):
        for low, high, now in pieces:
            what = effect(requests, now)
            right.barh(row, float(high - low), left=float(low), color=colours[what], height=0.6)
    row = list(every).index(changed)
    taus = [m.unclipped_tau for m in found.values()]
    right.plot(taus, [row] * len(taus), "o", color=style.INK, markersize=4)
    right.set_yticks(range(len(every)), [f"{r} requests" for r in every])
    right.set_xlabel("tau of this point alone")
    handles = [Patch(color=c, label=name) for name, c in colours.items()]
    right.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.05, 1.0), ncols=4, frameon=False,
        fontsize=7.5, labelcolor=style.INK, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip
    return made


def effect(requests: int, now: list[int]) -> str:
    """What a set says about the point whose tau was changed."""
    before = survivors(requests, BASE)
    if now == before:
        return "as before"
    if requests in now and requests not in before:
        return "joins"
    return "drives others out" if requests in now else "leaves"


EXERCISE = Exercise(
    "Can acceptance at one operating point change which points are not dominated, and which "
    "counts measure that point's tau?",
    predict,
    answer,
)
