r"""Predicts real vLLM runs from kernel tables alone, then with a step model fitted by gradient.

  python -m experiments.fidelity --config=configs/fidelity.py --workdir=runs/fidelity
  python -m experiments.fidelity --run_folder=my_run     # requests.jsonl, meta.json, config.json, profile/

(a) The step model is the affine one closest to the tables; nothing of the run is fitted. (b) Its
coefficients are fitted to TTFT and E2E of the first requests by Gauss-Newton, with derivatives
through the simulator (`jax.jvp`, float time), and scored on the others, exact time. Arrivals and
lengths of all requests are inputs of both. The runs hold no token times: of ITL only the mean is
known, (last - first token) over all requests divided by the tokens after the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.metrics import percentile
from deepinfer_jax.report import records
from deepinfer_jax.report.table import table
from deepinfer_jax.simulator import loop
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.simulate import compiler_options, prepare
from deepinfer_jax.simulator.trajectory import trajectory
from experiments import harness
from experiments.ground_truth import Measured, read

FOLDER = flags.DEFINE_string("run_folder", "", "A directory with a run of your own.")
QUICK: dict[str, bool | str | int] = {"xla_backend_optimization_level": 0}
FITTED = ("prefill_base", "prefill_token", "decode_forms")


def simulated(m: Measured, cost: StepCost) -> dict[str, np.ndarray]:
    """TTFT, E2E and TPOT [Q] in seconds, exact time."""
    cluster = dataclasses.replace(m.cluster, cost=cost)
    t = prepare(cluster, m.load, options=QUICK).run()[0].requests
    first, last = ((np.asarray(x) - t.arrival) / 1e9 for x in (t.first_token, t.finish))
    return {"ttft": first, "e2e": last, "tpot": (last - first) / np.maximum(t.output_tokens - 1, 1)}


def errors(m: Measured, found: dict[str, np.ndarray], which: slice) -> list[dict[str, Any]]:
    """Relative errors of mean and percentiles, and the median of the requests' own errors."""
    rows = []
    for name in ("ttft", "tpot", "e2e"):
        real, made = getattr(m, name)[which], found[name][which]
        row: dict[str, Any] = {"metric": name.upper(), "mean": made.mean() / real.mean() - 1}
        for p in (50, 90, 99):
            row[f"p{p}"] = percentile(made, p) / percentile(real, p) - 1
        rows.append({**row, "median APE": float(np.median(np.abs(made / real - 1)))})
    tokens = np.asarray(m.load.output_tokens)[which] - 1
    gaps = [np.sum(x * tokens) for x in (found["tpot"][which], m.tpot[which])]
    return [*rows, {"metric": "ITL", "mean": gaps[0] / gaps[1] - 1}]


def fitted(m: Measured, steps: int, requests: int) -> StepCost:
    """The coefficients `FITTED` scaled so that the first `requests` fit, by damped Gauss-Newton."""
    with jax.enable_x64(True):
        load = dataclasses.replace(m.load, arrival=np.asarray(m.load.arrival, np.float64))
        shape, scenario = split(m.cluster, m.load, exact=False)
        real = np.log(np.concatenate([m.ttft[:requests], m.e2e[:requests]]))

        def logs(x: jax.Array) -> jax.Array:
            f = jnp.exp(x)
            c = scenario.cost
            cost = dataclasses.replace(
                c,
                prefill_base=c.prefill_base * f[0],
                prefill_token=c.prefill_token * f[1],
                decode_forms=c.decode_forms * f[2:],
            )
            t = trajectory(
                shape, load, loop.run(shape, dataclasses.replace(scenario, cost=cost), load)
            ).requests
            both = [(e - t.arrival)[:requests] / 1e9 for e in (t.first_token, t.finish)]
            return jnp.log(jnp.concatenate(both))

        tangent = jax.jit(
            lambda x, d: jax.jvp(logs, (x,), (d,)), compiler_options=compiler_options() | QUICK
        )
        x, best, best_loss, damping = np.zeros(5), np.zeros(5), np.inf, 1e-2
        slopes = base = np.zeros(0)
        for _ in harness.progress(range(steps), "fitting"):
            columns = [tangent(x, d) for d in np.eye(5)]
            value = np.asarray(columns[0][0]) - real
            loss = float(np.sum(np.sqrt(1 + (value / 0.1) ** 2) - 1))  # outliers count linearly
            if loss < best_loss:
                best, best_loss, damping = x, loss, damping / 3
                weight = (1 + (value / 0.1) ** 2) ** -0.25
                slopes = np.stack([np.asarray(c[1]) for c in columns], 1) * weight[:, None]
                base = value * weight
            else:
                damping *= 10
            square = slopes.T @ slopes
            x = best - np.linalg.solve(
                square + damping * np.trace(square) * np.eye(5), slopes.T @ base
            )
    f, c = np.exp(best), m.cluster.cost
    return dataclasses.replace(
        c,
        prefill_base=round(c.prefill_base * f[0]),
        prefill_token=round(c.prefill_token * f[1]),
        decode_forms=np.rint(c.decode_forms * f[2:]).astype(np.int64),
    )


def percent(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    keys = ("mean", "p50", "p90", "p99", "median APE")
    return [
        {"metric": r["metric"]} | {k: f"{r[k]:+.1%}" if k in r else "-" for k in keys} for r in rows
    ]


def study(m: Measured, steps: int, requests: int) -> dict[str, Any]:
    """Prints and returns the errors of one run."""
    found = simulated(m, m.table.cost)
    result: dict[str, Any] = {"from tables": errors(m, found, slice(None))}
    print(table(percent(result["from tables"]), title=f"{m.name}: from its tables alone"))
    worst = int(np.argmax(np.abs(found["e2e"] - m.e2e)))
    result["largest residual"] = {
        "request": worst,
        "measured e2e": float(m.e2e[worst]),
        "simulated e2e": float(found["e2e"][worst]),
        "of it before the first token": float(found["ttft"][worst] - m.ttft[worst]),
    }
    print("largest residual:", result["largest residual"])
    print(
        f"affine steps against the tables, median: decode {m.table.decode_error:.1%}, "
        f"mixed {m.table.mixed_error:.1%}"
    )
    result["outside the tables"] = m.outside
    for what, count in m.outside.items():
        print(f"warning: {count} lookups outside a table: {what}")
    if steps:
        cost = fitted(m, steps, requests)
        held = errors(m, simulated(m, cost), slice(requests, None))
        result |= {"fitted, held out": held, "fitted cost": dataclasses.asdict(cost)}
        print(table(percent(held), title=f"{m.name}: fitted, scored from request {requests} on"))
    print(m.peer)
    return result


def main(run: harness.Run) -> None:
    p = run.parameters
    folders = [FOLDER.value] if FOLDER.value else p["runs"]
    found = {}
    for folder in folders:
        m = read(folder)
        found[m.name] = study(m, p["fit_steps"], p["fit_requests"])
        if run.workdir:
            records.write_json(run.workdir / "summary.json", {**records.environment(), **found})


if __name__ == "__main__":
    harness.run(main, config="configs/fidelity.py")
