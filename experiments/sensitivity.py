r"""What one percent more of a cost does to latency: derivatives through the simulator, and differences.

  python -m experiments.sensitivity --config=configs/sensitivity.py --workdir=runs/sensitivity

`jax.jvp` in float time follows every event time while every decision (who is batched with whom,
who goes where, who is within an objective) stays as it was. Central differences with common random
numbers let decisions change. Where the metric moves continuously through a change of decision the
two agree and the derivative is the cheaper, exact one. Where it jumps, every run's derivative
misses the jumps, and no number of runs averages that away: the difference is the bias, shown with
its interval. A share within an objective only moves in jumps, so its derivative is always zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.report.table import table
from deepinfer_jax.simulator import loop
from deepinfer_jax.simulator.scenario import Scenario, split
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.simulate import compiler_options
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.trajectory import Trajectory, trajectory
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.workload import Workload, workload
from experiments import batch, harness
from experiments.sensitivity_findings import Findings

COSTS = ("prefill_step", "prefill_token", "decode_step", "decode_request")
"""What may be changed, as `service.SecondsCost` names it; the last two of every decode form."""


def scaled(cost: StepCost, x: Any) -> StepCost:
    """`cost` with `COSTS` multiplied by exp(x). x: [4]."""
    f = jnp.exp(x)
    columns = jnp.stack([f[2], f[3], jnp.ones_like(f[0])])
    return dataclasses.replace(
        cost,
        prefill_base=cost.prefill_base * f[0],
        prefill_token=cost.prefill_token * f[1],
        decode_forms=cost.decode_forms * columns,
    )


def reduce(run: Trajectory, *, ttft: float, warmup: float) -> dict[str, Any]:
    """Means over the requests after the warm-up, in seconds, and the share within `ttft`."""
    t = run.requests
    kept = jnp.arange(len(t.arrival)) >= int(warmup * len(t.arrival))
    first, whole = (
        (x - t.arrival) / metrics.NANOSECONDS_PER_SECOND for x in (t.first_token, t.finish)
    )
    mean = lambda x: jnp.sum(jnp.where(kept, x, 0.0)) / jnp.sum(kept)  # noqa: E731
    return {"TTFT": mean(first), "E2E": mean(whole), "within": mean((first <= ttft) * 1.0)}


def decisions(run: Trajectory) -> Any:
    """A number that differs when engines, the order of events, their ties or step counts do.

    Events of all requests are sorted together, so a request that joins other batches shows, unless
    it joins at another step boundary between the same two events.
    """
    t = run.requests
    events = (t.arrival, t.prefill_start, t.first_token, t.handed_off, t.decode_start, t.finish)
    times = jnp.concatenate(events)
    order = jnp.argsort(times, stable=True)
    sorted_times = times[order]
    tied = jnp.concatenate([jnp.zeros(1, bool), sorted_times[1:] == sorted_times[:-1]])
    seen = (t.prefill_engine, t.decode_engine, order, tied, run.steps.reshape(-1))
    return sum(
        jnp.sum((k + 1.0) * jnp.sin(1.0 + jnp.arange(len(x))) * x) for k, x in enumerate(seen)
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """One scenario in float time, compiled once: metrics and their derivative along one cost."""

    compiled: Any
    scenarios: Sequence[Scenario]
    loads: Sequence[Workload]

    def at(self, points: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> Any:
        """(metrics, derivatives, decisions) [N] of (draw, x [4], direction [4]) triples."""
        draws, x, d = (np.stack([np.asarray(p[i]) for p in points]) for i in range(3))
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.compiled((draws, x, d)))


def model(parameters: Mapping[str, Any], one: Mapping[str, Any], seed: int) -> Model:
    """The model of the scenario `one` of a config, with `draws` draws of its requests."""
    values = {k: v for k, v in one.items() if k not in ("workload", "costs", "ttft")}
    cluster = translate(service(values), seed).cluster
    described, draws = source(one["workload"]), parameters["draws"]
    loads = [workload(described.trace(seed * draws + k)) for k in range(draws)]
    loads = [dataclasses.replace(x, arrival=np.asarray(x.arrival, np.float64)) for x in loads]
    warmup = parameters["warmup_share"]
    with jax.enable_x64(True):
        parts = [split(cluster, load, exact=False) for load in loads]
        shape, scenario = parts[0]
        every = jax.tree.map(lambda *x: jnp.stack(x), *loads)

        def run(x: Any, load: Workload) -> Any:
            changed = dataclasses.replace(scenario, cost=scaled(scenario.cost, x))
            made = trajectory(shape, load, loop.run(shape, changed, load))
            return reduce(made, ttft=one["ttft"], warmup=warmup), decisions(made)

        def point(numbers: Any) -> Any:
            draw, x, direction = numbers
            load = jax.tree.map(lambda a: a[draw], every)
            (value, chosen), (slope, _) = jax.jvp(lambda x: run(x, load), (x,), (direction,))
            return value, slope, chosen

        options = compiler_options() | (batch.QUICK if parameters["compile"] == "quick" else {})
        mapped = jax.jit(lambda x: jax.lax.map(point, x), compiler_options=options)
    return Model(mapped, [s for _, s in parts], loads)


def measure(
    parameters: Mapping[str, Any], one: Mapping[str, Any], seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """{cost: numbers} of one scenario; K draws, H steps.

    Numbers: `value M` [K], `slope M` [K], `above M` and `below M` [K, H] for each metric M, and
    `changed` [K, H], whether any decision differs between the two sides.
    """
    made, draws = model(parameters, one, seed), range(parameters["draws"])
    axes = {name: np.eye(len(COSTS))[COSTS.index(name)] for name in one["costs"]}
    points = []
    for direction in axes.values():
        steps = [s * h for h in parameters["steps"] for s in (1, -1)]
        points += [(k, x * direction, direction) for x in (0.0, *steps) for k in draws]
    value, slope, chosen = made.at(points)
    grid = (len(axes), 1 + 2 * len(parameters["steps"]), len(draws))
    cut = lambda x: np.moveaxis(x.reshape(grid), 2, 1)  # noqa: E731  [costs, draws, points]
    decided = cut(chosen)
    found = {}
    for i, name in enumerate(axes):
        numbers = {"changed": decided[i, :, 1::2] != decided[i, :, 2::2]}
        for metric, x in value.items():
            numbers[f"value {metric}"] = cut(x)[i, :, 0]
            numbers[f"slope {metric}"] = cut(slope[metric])[i, :, 0]
            numbers[f"above {metric}"] = cut(x)[i, :, 1::2]
            numbers[f"below {metric}"] = cut(x)[i, :, 2::2]
        found[name] = numbers
    return found


def main(run: harness.Run) -> None:
    p = run.parameters
    found = {}
    for name, one in harness.progress(list(p["scenarios"].items()), "scenarios"):
        found[name.replace("_", " ")] = measure(p, one, run.seed)
    made = Findings(found, p["steps"], p["compared_step"], p["title"])
    print("\n" + table(made.rows(), title=made.heading()))
    for sentence in made.sentences():
        print(f"* {sentence}")
    if run.workdir:
        made.write(run.workdir, run.provenance)
        print(f"\nwrote {run.workdir}/report.html")


if __name__ == "__main__":
    harness.run(main, config="configs/sensitivity.py")
