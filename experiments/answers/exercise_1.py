"""One decode worker instead of two: how much of a saving in prefill reaches the last answer?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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

CACHES = {"local": False, "shared": True}


def predicted(lab: QueueLab) -> dict[str, float]:
    """Last prefill, last answer and mean waits, in units, by the recursion of two queues."""
    work = (lab.input_tokens - lab.reused_tokens) / lab.tokens_per_unit
    everyone = range(lab.requests)
    prefilled = ends(
        [lab.match for _ in everyone],
        [work for _ in everyone],
        lab.prefill_workers if lab.shared else 1,
    )
    ready = [p + lab.handoff for p in prefilled]
    finished = ends(ready, [lab.decode for _ in everyone], lab.decode_workers)
    return {
        "last prefill": max(prefilled),
        "last answer": max(finished),
        "prefill wait": float(np.mean(prefilled)) - lab.match - work,
        "decode wait": float(np.mean(finished)) - lab.decode - float(np.mean(ready)),
    }


def measured(t: RequestTimeline) -> dict[str, float]:
    """The same four numbers of a run."""
    return {
        "last prefill": t.first_token.max() / UNIT,
        "last answer": t.finish.max() / UNIT,
        "prefill wait": float(np.mean(t.prefill_start - t.matched)) / UNIT,
        "decode wait": float(np.mean(t.decode_start - t.handed_off)) / UNIT,
    }


def labs_of(section: Mapping[str, Any]) -> dict[tuple[int, str], QueueLab]:
    """Lab 23 by (decode workers, cache)."""
    return {
        (workers, name): QueueLab(decode_workers=workers, shared=shared)
        for workers, (name, shared) in itertools.product(section["decode_workers"], CACHES.items())
    }


def saving(values: Mapping[Any, Mapping[str, float]], workers: int, what: str) -> float:
    """Units by which sharing makes `what` earlier."""
    return values[workers, "local"][what] - values[workers, "shared"][what]


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    del seed
    values = {key: predicted(lab) for key, lab in labs_of(section).items()}
    lasts = ", ".join(
        f"{saving(values, n, 'last answer'):g} with {n}" for n in section["decode_workers"]
    )
    few = min(section["decode_workers"])
    return Prediction(
        f"Sharing ends the last prefill {saving(values, few, 'last prefill'):g} units earlier "
        f"whatever follows. The last answer comes earlier by {lasts} decode workers: one worker "
        "that is never idle after its first request ends at the first hand-off plus all decode "
        "work, and sharing does not move the first hand-off. What prefill saves is waited for "
        f"in front of decode: with {few}, the mean wait for prefill falls by "
        f"{saving(values, few, 'prefill wait'):g} and that for decode grows by "
        f"{-saving(values, few, 'decode wait'):g}.",
        values,
    )


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    del seed
    made = labs_of(section)
    runs = batch.run({key: (lab.cluster(), lab.workload()) for key, lab in made.items()})
    values = {key: measured(run.requests) for key, run in runs.items()}
    few = min(section["decode_workers"])
    agree = all(
        np.isclose(values[key][name], prediction.values[key][name])
        for key in values
        for name in values[key]
    )
    rows = [
        {"decode workers": n, "cache": name}
        | {f"{k}": round(v, 6) for k, v in values[n, name].items()}
        | {"predicted last answer": prediction.values[n, name]["last answer"]}
        for n, name in values
    ]
    absorbed = -saving(values, few, "decode wait")
    return Answer(
        f"With {few} decode worker the last prefill ends {saving(values, few, 'last prefill'):g} "
        f"units earlier and the last answer {saving(values, few, 'last answer'):g}: the queue for "
        f"the decode worker absorbs it. A mean request waits "
        f"{saving(values, few, 'prefill wait'):g} units less for prefill and {absorbed:g} more "
        "for decode. A faster stage in front of a saturated one moves the queue; only the time "
        "to first token, which ends before it, keeps the saving. "
        + ("Every number is the predicted one." if agree else "THE PREDICTION FAILED."),
        [Table("Assigned time units; waits are means over four requests", rows)],
        [
            Plot(
                "exercise_1",
                "Where the saved time goes",
                "Left: mean waits. Right: units by which sharing makes the last prefill and the "
                "last answer earlier; rings: predicted.",
                figure(values, prediction.values, section["decode_workers"]),
            )
        ],
        {
            "agrees": agree,
            "values": {f"{n} {name}": v for (n, name), v in values.items()},
        },
    )


def figure(
    values: Mapping[Any, Mapping[str, float]],
    predicted_values: Mapping[Any, Mapping[str, float]],
    workers: tuple[int, ...],
) -> Figure:
    """Stacked mean waits of every case, and the surviving savings over decode workers."""
    made, (left, right) = style.figure(2, width=9.4, height=3.2)
    style.dress(left, "x")
    style.title(left, "Mean wait of a request (units)", pad=18)
    for row, one in enumerate(values.values()):
        begin = 0.0
        for index, name in enumerate(("prefill wait", "decode wait")):
            label = name if row == 0 else None
            left.barh(
                row, one[name], left=begin, color=style.colour(index), height=0.66, label=label
            )
            begin += one[name]
    names = [f"{name} cache, {n} decode worker{'s' * (n > 1)}" for n, name in values]
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    style.legend(left, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0)
    style.title(right, "Earlier by sharing (units)", pad=18)
    for index, what in enumerate(("last prefill", "last answer")):
        colour = style.colour(2 + index)
        y = [saving(values, n, what) for n in workers]
        ring = [saving(predicted_values, n, what) for n in workers]
        right.plot(workers, y, "o-", color=colour, label=what, markersize=5)
        right.plot(workers, ring, "o", markersize=10, markerfacecolor="none", color=colour)
    right.set_xlabel("decode workers")
    right.set_xticks(list(workers))
    right.set_ylim(-0.4, None)
    style.legend(right, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0)
    return made


EXERCISE = Exercise(
    "With one decode worker instead of two, which prefill saving survives in the final "
    "completion, and which queue absorbs the rest?",
    predict,
    answer,
)
