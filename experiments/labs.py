"""Reproduces the chapter's three labs: service queues (23), hit lengths (24), the frontier (25).

  python -m experiments.labs --lab=24
  python -m experiments.labs --workdir=runs/labs     # all three, with figures and a page

Expect the chapter's numbers to the digit: tests/experiments/labs_test.py holds them. Lab 23 is run
by the cluster simulator (two compilations, under a minute); the other two take a second.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from absl import flags
from matplotlib.patches import Patch

from deepinfer_jax.cost import acceptance, capacity, frontier, published
from deepinfer_jax.policy.prefix import BLOCK_TOKENS, RESERVE, hit_lengths
from deepinfer_jax.report import page, plots, records, style, write
from deepinfer_jax.report.table import table
from deepinfer_jax.simulator.labs import LAB_23, UNIT, QueueLab
from deepinfer_jax.timeline import RequestTimeline
from experiments import batch, harness

LAB = flags.DEFINE_enum("lab", "all", ["23", "24", "25", "all"], "Which lab to run.")

RECORDS_25 = {8: 100, 16: 90, 32: 60, 48: 35, 64: 40}
"""Assigned steps per second by requests per rank; 48 is dominated on purpose."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """What a lab found: its tables, one sentence each on the rest, and a figure if it has one."""

    title: str
    tables: list[page.Table]
    sentences: list[str]
    plots: list[page.Plot]
    summary: dict[str, Any]


def service(cases: Mapping[str, QueueLab]) -> dict[str, RequestTimeline]:
    """Every case's request times."""
    made = {name: (case.cluster(), case.workload()) for name, case in cases.items()}
    return {name: run.requests for name, run in batch.run(made).items()}


def units(ticks: np.ndarray) -> list[int]:
    """Sorted times in whole units."""
    return sorted(int(t) // UNIT for t in ticks)


def lab_23() -> Lab:
    """Four requests, two prefill and two decode workers; then the linear capacity model."""
    runs = service(LAB_23)
    ends = {name: (units(t.first_token), units(t.finish)) for name, t in runs.items()}
    rows = [{"case": name, "P ends": str(p), "D ends": str(d)} for name, (p, d) in ends.items()]
    gpus = {}
    for reused in (0.0, 0.75):
        prefill = capacity.prefill_gpus(4, 1024, reused, 2048, 0.8)
        gpus[f"{reused:.0%}"] = (prefill, capacity.decode_gpus(4, 64, 128, 0.8))
    estimate = [{"input tokens reused": k, "P": p, "D": d} for k, (p, d) in gpus.items()]
    return Lab(
        "Lab 23: four requests share a prefix",
        [
            page.Table("When workers finish, in assigned time units", rows),
            page.Table(
                "GPU equivalents by the linear capacity model",
                estimate,
                "4 requests/s of 1,024 + 64 tokens; 2,048 new and 128 output tokens/s per GPU; "
                "80 % utilised. Not deployable group sizes.",
            ),
        ],
        [
            "Without ownership of the prefix both prefill workers serve the queue, and the last "
            "answer comes two units earlier whatever the hand-off costs: decode now delays the "
            "last pair.",
            "Reuse changes the prefill estimate alone, because output work stays at 256 tokens/s.",
        ],
        [
            page.Plot(
                "lab_23",
                "Who works when",
                "One row per worker, one colour per request: P prefill, D decode; the gap between "
                "the two is matching, the hand-off and waiting.",
                gantt(runs),
            )
        ],
        {"ends": ends, "gpu_equivalents": gpus},
    )


def gantt(runs: Mapping[str, RequestTimeline]) -> Any:
    """One panel per case, one bar per request and worker."""
    made, axes = style.figure(len(runs), width=9.4, height=2.4)
    last = max(int(t.finish.max()) for t in runs.values()) / UNIT
    for ax, (name, t) in zip(axes, runs.items(), strict=True):
        style.dress(ax, "x")
        style.title(ax, name.replace(", ", ",\n"))
        for i in range(len(t.arrival)):
            for engine, start, end in (
                (t.prefill_engine[i], t.prefill_start[i], t.first_token[i]),
                (t.decode_engine[i], t.decode_start[i], t.finish[i]),
            ):
                ax.barh(
                    engine, (end - start) / UNIT, left=start / UNIT, height=0.72,
                    color=style.colour(i), edgecolor=style.PAPER, linewidth=0.8,
                )  # fmt: skip
        ax.set_yticks(range(4), ["P0", "P1", "D0", "D1"] if ax is axes[0] else [""] * 4)
        ax.set_xlim(0, last)
        ax.set_ylim(3.6, -0.6)
        ax.set_xticks(range(0, int(last) + 1, 4))
    handles = [Patch(color=style.colour(i), label=f"request {i}") for i in range(4)]
    made.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )  # fmt: skip
    return made


def lab_24() -> Lab:
    """Two lengths of one hit, six rows, then every small case against an enumeration."""
    rows = []
    for length in (128, 261, 262, 390, 902, 1024):
        block, present = hit_lengths(length, length // BLOCK_TOKENS * BLOCK_TOKENS, True)
        missing = hit_lengths(length, length // BLOCK_TOKENS * BLOCK_TOKENS, False)[1]
        rows.append(
            {
                "L": length,
                "block hit L1": int(block),
                "H, SWA present": int(present),
                "H, SWA missing": int(missing),
            }
        )
    checked = enumerate_hits()
    return Lab(
        "Lab 24: a hit has two lengths",
        [
            page.Table(
                "Prompt tokens whose KV is reused (L1) or whose computation is skipped (H)", rows
            )
        ],
        [
            f"{checked:,} cases checked against all aligned candidates: bounds, alignment, one "
            "block of backoff exactly when the window state is missing, and monotone in the "
            "cached length.",
            "At L = 902 without the window state, positions 640 to 767 only rebuild that state: "
            "their block KV is there already.",
        ],
        [],
        {"rows": rows, "checked": checked},
    )


def enumerate_hits(longest: int = 2048) -> int:
    """Checks `hit_lengths` on L in 0..longest x aligned C x state present or not.

    Returns:
      The number of cases.

    Raises:
      AssertionError: the formula and the enumeration differ, or a property fails.
    """
    cached = np.arange(0, longest + 1, BLOCK_TOKENS)
    length, extent, swa = np.meshgrid(np.arange(longest + 1), cached, [False, True], indexing="ij")
    block, compute = hit_lengths(length, extent, swa)
    # The largest aligned candidate that neither the reserve nor the store forbids.
    candidates = cached[:, None, None, None]
    allowed = (candidates <= length - RESERVE) & (candidates <= extent) | (candidates == 0)
    best = np.where(allowed, candidates, 0).max(axis=0)
    assert np.array_equal(block, best), "L1 is not the largest allowed candidate"
    assert (compute >= 0).all() and (compute <= block).all() and (block <= extent).all()
    assert (block <= np.maximum(length - RESERVE, 0)).all(), "the reserve is not kept"
    assert not ((block % BLOCK_TOKENS).any() or (compute % BLOCK_TOKENS).any()), "not aligned"
    backoff = np.where((block > 0) & ~swa, BLOCK_TOKENS, 0)
    assert np.array_equal(block - compute, backoff), "backoff is not one block"
    for hit in (block, compute):
        assert (np.diff(hit, axis=1) >= 0).all(), "a longer cached prefix shortened the hit"
    return int(block.size)


def lab_25() -> Lab:
    """A frontier of assigned records, and two meanings of 75 % acceptance."""
    nextn, accepted = 3, Fraction(3, 4)
    mean = acceptance.tau_from_mean_fraction(accepted, nextn)
    conditional = acceptance.tau_by_enumeration([accepted] * nextn)
    points = [frontier.OperatingPoint(r, s, float(mean)) for r, s in RECORDS_25.items()]
    kept = frontier.frontier(points)
    same = [p.requests for p in kept] == [
        p.requests
        for p in frontier.frontier([dataclasses.replace(p, tau=float(conditional)) for p in points])
    ]
    assert same, "a common factor cannot change the frontier"
    point = published.WIDE_EP_DECODE
    implied = frontier.OperatingPoint(point.requests, point.steps_per_second, point.tau)
    rows = [
        {
            "requests": p.requests,
            "steps/s": f"{p.steps_per_second:.0f}",
            "tokens/s/user": f"{p.user_rate:.2f}",
            "tokens/s/GPU": f"{p.device_rate:.2f}",
            "frontier": "yes" if p in kept else "dominated",
        }
        for p in points
    ]
    shrink = 100 * (1 - conditional / mean)
    readings = {
        "tau, 0.75 is the mean accepted fraction": f"{float(mean):.6f}",
        "tau, 0.75 is each conditional acceptance": f"{float(conditional):.6f}",
        "both axes shrink by (175/208 is left)": f"{float(shrink):.4f} %",
        "published point, 246 / 3.25": f"{point.steps_per_second:.2f} steps/s",
        "implied at 64 requests, CP 1": f"{implied.device_rate:.0f} tokens/s/GPU",
    }
    return Lab(
        "Lab 25: check a published curve",
        [
            page.Table("Assigned records at tau 3.25", rows),
            page.Table(
                "What 75 % acceptance may mean (8 patterns enumerated in fractions)",
                [{"quantity": name, "value": value} for name, value in readings.items()],
            ),
        ],
        [
            f"Not dominated: {[p.requests for p in kept]}. A common factor on both axes keeps that "
            "set; an acceptance that differs from point to point may not.",
            "The published point is read off a picture, so it is approximate.",
        ],
        [
            page.Plot(
                "lab_25",
                "The frontier of the assigned records",
                "Labels are requests per rank. Both axes prefer larger values; 48 requests are "
                "worse than 32 on both.",
                plots.frontier(
                    np.asarray([p.user_rate for p in points]),
                    np.asarray([p.device_rate for p in points]),
                    np.asarray([p in kept for p in points]),
                    xlabel="tokens/s of one user",
                    ylabel="tokens/s of one GPU",
                    labels=[str(p.requests) for p in points],
                ),
            )
        ],
        {
            "points": rows,
            "frontier": [p.requests for p in kept],
            "tau_mean_fraction": float(mean),
            "tau_conditional": float(conditional),
            "shrink_percent": float(shrink),
            "published_steps_per_second": point.steps_per_second,
            "published_tokens_per_second_per_gpu": implied.device_rate,
        },
    )


LABS: dict[str, Callable[[], Lab]] = {"23": lab_23, "24": lab_24, "25": lab_25}


def show(lab: Lab) -> None:
    """The lab as text."""
    print(f"\n{lab.title}\n")
    for one in lab.tables:
        print(table(one.rows, title=one.title))
        print(*textwrap.wrap(one.note, 100), "", sep="\n")
    for sentence in lab.sentences:
        print(textwrap.fill(f"* {sentence}", 100, subsequent_indent="  "))


def main(run: harness.Run) -> None:
    chosen = {k: make() for k, make in LABS.items() if LAB.value in (k, "all")}
    for lab in chosen.values():
        show(lab)
    if not run.workdir:
        return
    drawn = [plot for lab in chosen.values() for plot in lab.plots]
    environment = records.environment()
    records.write_json(
        run.workdir / "summary.json",
        {**environment, **{f"lab_{k}": lab.summary for k, lab in chosen.items()}},
    )
    write.write_plots(run.workdir, drawn)
    page.write(
        run.workdir / "report.html",
        page.Page(
            "The chapter's labs",
            "Queues, hit lengths and a frontier, computed by this repository's simulator and "
            "cost functions",
            sentences=[s for lab in chosen.values() for s in lab.sentences],
            plots=drawn,
            tables=[
                dataclasses.replace(t, title=f"{lab.title.partition(':')[0]}. {t.title}")
                for lab in chosen.values()
                for t in lab.tables
            ],
            environment=environment,
        ),
    )
    print(f"\nwrote {run.workdir}/report.html")


if __name__ == "__main__":
    harness.run(main, config=None)
