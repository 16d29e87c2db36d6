r"""What a shorter retention costs: tokens hit, tokens to compute and blocks held, 7 days against 3.

  python -m experiments.retention --config=configs/retention.py --workdir=runs/retention

A synthetic service of three weeks (conversations whose users return after hours or days, agents beside
them) is simulated once per assumption on returns, seed and TTL of chats; agents keep theirs. The cache
has no other limit. Counted is the last week, in which a TTL of 7 days has forgotten, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax.report import records, style
from deepinfer_jax.report.page import Plot
from deepinfer_jax.report.table import table
from deepinfer_jax.report.write import write_plots
from deepinfer_jax.simulator.conversations import CHAT, DAY_SECONDS, Conversations
from deepinfer_jax.simulator.plain_config import build
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.simulate import Prepared, numbers, prepare
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.workload import Workload, with_nodes, workload
from experiments import harness

Row = dict[str, Any]
TICKS_PER_DAY = DAY_SECONDS * 10**9
DOCUMENTED = (0.005, 0.01)
"""The chapter, section 11.2: seven days to about three cost 0.5-1 % of the hit rate."""


def counted(run: Trajectory, load: Workload, week: float) -> Row:
    """Rates of the requests that arrive in the last `week` days; blocks are those at the end."""
    t = run.requests
    late = np.asarray(t.arrival) >= int(t.arrival[-1]) - week * TICKS_PER_DAY
    assert load.traffic is not None
    chat = late & (np.asarray(load.traffic) == CHAT)
    prompt, hit = (np.asarray(x, np.int64) for x in (t.input_tokens, t.block_hit_tokens))
    compute = prompt - np.asarray(t.compute_hit_tokens)
    return {
        "requests": int(late.sum()),
        "tokens hit": float(hit[late].sum() / prompt[late].sum()),
        "chat tokens hit": float(hit[chat].sum() / prompt[chat].sum()),
        "requests hit": float(np.mean(hit[late] > 0)),
        "tokens to compute": int(compute[late].sum()),
        "blocks held": int(run.blocks_present),
    }


def compared(long: Row, short: Row) -> Row:
    """The short TTL beside the long one; points are differences of rates times 100."""
    names = ("tokens hit", "chat tokens hit", "requests hit")
    made: Row = {f"{name}, points": 100 * (short[name] - long[name]) for name in names}
    for name in ("tokens hit", "chat tokens hit", "tokens to compute", "blocks held"):
        made[f"{name}, relative"] = short[name] / long[name] - 1
    return made


def readings(rate: float, loss: float) -> list[Row]:
    """What a documented `loss` means at a hit `rate`, read as points and as a relative loss."""
    rows = []
    for name, points in (("points", loss), ("relative", loss * rate)):
        growth = points / (1 - rate)
        rows.append({"read as": name, "at": rate, "points": points, "tokens to compute": growth})
    return rows


class Study:
    """Simulates any workload of one size under any TTL with one compiled program."""

    def __init__(self, parameters: Mapping[str, Any], loads: Mapping[Any, Workload]) -> None:
        self.parameters = parameters
        self.nodes = max(load.nodes for load in loads.values())
        self.program: Prepared | None = None

    def run(self, load: Workload, chat_days: float) -> Row:
        """The last week's rates with a TTL of so many days for chats."""
        p = self.parameters
        ttl = tuple(days * DAY_SECONDS for days in (chat_days, p["agent_days"]))
        collector = {"sweep_seconds": p["sweep_seconds"], "ttl_seconds": ttl}
        cache = {**p["cache"], "retention": collector}
        made = translate(service({**p["service"], "cache": cache})).cluster
        load = with_nodes(load, self.nodes)
        if self.program is None:
            self.program = prepare(made, load)
        arguments = numbers(made, load)[1]
        run, _ = dataclasses.replace(self.program, arguments=arguments).run()
        return counted(run, load, p["counted_days"])


def spread(rows: Sequence[Row], name: str) -> str:
    """The range of a difference over seeds; relative ones in percent."""
    scale = 100 if name.endswith("relative") else 1
    values = [scale * row[name] for row in rows]
    return f"{min(values):+.2f} to {max(values):+.2f}"


def figure(found: Sequence[Row], curve: Sequence[Row]) -> Figure:
    """What the same runs say in points, relative and in tokens to compute; tokens hit over the TTL."""
    made, (left, right) = style.figure(2, width=9.4, height=3.2)
    names = list(dict.fromkeys(row["case"] for row in found))
    kinds = [
        "tokens hit, points",
        "tokens hit, relative",
        "chat tokens hit, points",
        "tokens to compute, relative",
    ]
    for k, kind in enumerate(kinds):
        rows = [(names.index(r["case"]) + 0.18 * (k - 1.5), r["change"][kind]) for r in found]
        x, y = np.asarray(rows).T
        y = np.abs(y * (100 if kind.endswith("relative") else 1))
        left.plot(x, y, "o", color=style.colour(k), markersize=4, alpha=0.8, label=kind)
    left.axhspan(0.5, 1.0, color=style.MUTED, alpha=0.18, linewidth=0)
    left.set_yscale("log")
    left.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("size of the change (points or %)")
    style.title(left, "From 7 to 3 days; shaded: 0.5 to 1", pad=32)
    style.legend(left, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0)
    for k, name in enumerate(names):
        x, y = np.asarray([(r["days"], r["tokens hit"]) for r in curve if r["case"] == name]).T
        right.plot(x, 100 * y, "o-", color=style.colour(k), markersize=4, label=name)
    right.set_xlabel("TTL of chats (days)")
    right.set_ylabel("tokens hit (%)")
    right.set_xticks(sorted({r["days"] for r in curve}))
    style.title(right, "Tokens hit over the TTL", pad=32)
    style.legend(right, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, borderaxespad=0)
    return made


def report(found: Sequence[Row]) -> str:
    """The tables and what they allow to say."""
    names = list(found[0]["change"])
    cases = list(dict.fromkeys(row["case"] for row in found))
    of = {case: [r["change"] for r in found if r["case"] == case] for case in cases}
    rows = [{"7 to 3 days": n} | {case: spread(of[case], n) for case in cases} for n in names]
    rate = float(np.mean([row["long"]["tokens hit"] for row in found]))
    said = [row for loss in DOCUMENTED for at in (0.5, rate) for row in readings(at, loss)]
    keys = ("at", "points", "tokens to compute")
    texts = [{"read as": r["read as"]} | {k: f"{100 * r[k]:.2f} %" for k in keys} for r in said]
    return "\n\n".join(
        [
            table(rows, title=f"Ranges over {len(of[cases[0]])} seeds; relative ones in %"),
            table(texts, title="What 0.5 and 1 % would mean"),
            "The documented 0.5-1 % names neither points nor a relative loss, nor the rate it is of: at "
            f"{100 * rate:.0f} % of tokens\nhit the two differ by a factor of {1 / rate:.2f}, at 50 % by 2; "
            "the tokens to compute grow by 1/(1 - rate) times the points,\nand the share of requests "
            "with any hit hardly moves. So it is not substituted into a capacity anywhere.",
        ]
    )


def main(run: harness.Run) -> None:
    p = run.parameters
    long, short = p["days"]
    loads = {
        (case, seed): workload(build(Conversations, {**p["workload"], **change}).trace(seed))
        for case, change in p["cases"].items()
        for seed in range(run.seed, run.seed + p["seeds"])
    }
    study = Study(p, loads)
    found, curve = [], []
    for (case, seed), load in harness.progress(loads.items(), "weeks"):
        name = case.replace("_", " ")
        rows = {days: study.run(load, days) for days in (long, short)}
        change = compared(rows[long], rows[short])
        found.append(
            {"case": name, "seed": seed, "long": rows[long], "short": rows[short], "change": change}
        )
        if seed == run.seed:
            rows |= {d: study.run(load, d) for d in p["curve_days"] if d not in rows}
            curve += [{"case": name, "days": d, **rows[d]} for d in sorted(rows)]
    print(report(found))
    if run.workdir:
        content = {**records.environment(), "weeks": found, "curve": curve}
        records.write_json(run.workdir / "summary.json", content)
        note = "One point per seed; the curve is the first seed's."
        plot = Plot("retention", "A shorter retention", note, figure(found, curve))
        print(f"\nwrote {write_plots(run.workdir, [plot])[0]}")


if __name__ == "__main__":
    harness.run(main, config="configs/retention.py")
