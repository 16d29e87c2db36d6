r"""Compares placement policies on the same requests, with intervals over replicates.

  python -m experiments.compare_policies --config=configs/compare_policies.py --workdir=runs/policies
  python -m experiments.compare_policies --config.replicates=16 --trace=my_requests.jsonl

A replicate is a stretch of the trace (stretches do not overlap; synthetic requests are drawn anew)
with draws of its own. All policies see the same replicates, so the difference of two policies is
taken replicate by replicate: what they share, a busy stretch for instance, cancels. Intervals are
Student's t over replicates: stretches of one trace share its trend, and nothing corrects for the
number of policies, so an interval describes this trace. All routing policies run in one compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from deepinfer_jax import metrics
from deepinfer_jax.policy import registry
from deepinfer_jax.report.table import table
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.plain_config import merged
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.source import Synthetic, source
from deepinfer_jax.simulator.traces import Trace, take
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.workload import Workload, with_nodes, workload
from experiments import batch, harness, policy_choice
from experiments.policy_findings import Findings
from experiments.simulation import workload_values

TRACE = flags.DEFINE_string("trace", "", "A trace file to use instead of the config's.")
SECTIONS = ("model", "hardware", "engines", "cost", "memory", "cache", "links", "prefill", "tiers",
            "decode", "policy")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arm:
    """One thing that is compared: a group of the report, a name, a cluster."""

    group: str
    name: str
    cluster: ClusterConfig


def arms(parameters: Mapping[str, Any], seed: int) -> list[Arm]:
    """Prefill policies, then decode policies, then the named `services`, as the config lists them.

    Raises:
      ValueError: the baseline of a group is not among its arms.
    """
    base = {name: parameters[name] for name in SECTIONS if name in parameters}
    wanted: list[tuple[str, str, Mapping[str, Any]]] = []
    for kind in ("prefill", "decode"):
        names = parameters["compare"][kind] or [
            n for n in registry.names(kind) if (kind, n) != ("prefill", "pull")
        ]
        wanted += [(kind, name, {"policy": {kind: name}}) for name in names]
    wanted += [
        ("service", name.replace("_", " "), change)
        for name, change in parameters["compare"]["services"].items()
    ]
    made = []
    for group, name, change in wanted:
        whole = {k: v for k, v in merged(base, change).items() if v is not None}
        made.append(Arm(group, name, translate(service(whole), seed).cluster))
    for group, baseline in parameters["baselines"].items():
        names = [arm.name for arm in made if arm.group == group]
        if names and baseline not in names:
            raise ValueError(
                f"baselines.{group} is {baseline}, which is not compared: take one of "
                f"{', '.join(names)}"
            )
    return made


def stretches(parameters: Mapping[str, Any], seed: int) -> list[Trace]:
    """The requests of every replicate, from time zero, equally many.

    Raises:
      ValueError: too few replicates for an interval, or a trace too short for them.
    """
    described = source(parameters["workload"])
    count, size = parameters["replicates"], parameters["requests"]
    if count < 2:
        raise ValueError(f"replicates={count}: an interval needs at least 2")
    if isinstance(described, Synthetic):
        each = dataclasses.replace(described, requests=size)
        return [each.trace(seed * count + k) for k in range(count)]
    whole = described.trace(seed)
    if len(whole) < count * size:
        raise ValueError(
            f"{whole.source} has {len(whole)} requests, but {count} replicates of {size} need "
            f"{count * size}: lower replicates or requests"
        )
    parts = [take(whole, np.arange(k * size, (k + 1) * size)) for k in range(count)]
    return [dataclasses.replace(p, arrival=p.arrival - p.arrival[0]) for p in parts]


def loads_of(cluster: ClusterConfig, traces: Sequence[Trace]) -> list[Workload]:
    """Every replicate for this cluster's blocks, with equally many trie nodes: one program takes all."""
    caching = cluster.cache_scope != "none"
    made = [workload(t, cluster.block_tokens, cluster.reserve, caching) for t in traces]
    return [with_nodes(load, max(other.nodes for other in made)) for load in made]


def reduce(run: Trajectory, *, slo: metrics.Slo, warmup: float) -> dict[str, Any]:
    """One run's numbers inside the compiled program; times in seconds.

    Args:
      warmup: share of the arrivals that is left out.
    """
    t = run.requests
    kept = jnp.arange(len(t.arrival)) >= int(warmup * len(t.arrival))
    done = kept & (t.status == metrics.COMPLETED)
    several = done & (t.output_tokens > 1)
    first, each, whole = metrics.ttft(t), metrics.tpot(t), metrics.e2e(t)
    clean = lambda values, mask: jnp.where(mask, values, 0.0)  # noqa: E731
    return {
        "completed": jnp.sum(t.status == metrics.COMPLETED),
        "ttft_mean": metrics.masked_mean(clean(first, done), done),
        "ttft_p99": metrics.masked_percentile(clean(first, done), done, 99),
        "tpot_mean": metrics.masked_mean(clean(each, several), several),
        "e2e_mean": metrics.masked_mean(clean(whole, done), done),
        "goodput_share": jnp.sum(metrics.meets(t, slo) & kept) / jnp.sum(kept),
        "token_hits": jnp.sum(clean(t.compute_hit_tokens, done))
        / jnp.sum(clean(t.input_tokens, done)),
    }


def measure(
    compared: Sequence[Arm], traces: Sequence[Trace], metric: Any, *, quick: bool = False
) -> dict[str, np.ndarray]:
    """`metric` of every arm and replicate: {name: [A, K]}. One compilation per program.

    `quick` compiles fast and runs slowly; the results are equal.
    """
    programs: dict[Any, list[tuple[int, Any]]] = {}
    loads: dict[Any, list[Workload]] = {}
    with jax.enable_x64(True):
        for a, arm in enumerate(compared):
            one = policy_choice.together(arm.cluster)
            key = (one.block_tokens, one.reserve, one.cache_scope == "none")
            if key not in loads:
                loads[key] = loads_of(one, traces)
            for k, load in enumerate(loads[key]):
                shape, scenario = split(dataclasses.replace(one, seed=one.seed + k), load)
                scenario = policy_choice.choose(scenario, arm.cluster)
                programs.setdefault((shape, key), []).append((a * len(traces) + k, scenario))
        found: dict[int, Any] = {}
        for (shape, key), rows in harness.progress(list(programs.items()), "programs"):
            which = [place % len(traces) for place, _ in rows]
            values = batch.many(
                shape, [scenario for _, scenario in rows], loads[key], which, metric, quick=quick
            )
            for row, (place, _) in enumerate(rows):
                found[place] = {name: value[row] for name, value in values.items()}
    grid = (len(compared), len(traces))
    return {
        name: np.asarray([found[i][name] for i in range(len(found))]).reshape(grid)
        for name in found[0]
    }


def main(run: harness.Run) -> None:
    p = run.parameters
    p = {**p, "workload": workload_values(p, TRACE.value, 0)}
    compared = arms(p, run.seed)
    traces = stretches(p, run.seed)
    slo = metrics.Slo(**p["slo"])
    metric = lambda t: reduce(t, slo=slo, warmup=p["warmup_share"])  # noqa: E731
    values = measure(compared, traces, metric, quick=p["compile"] == "quick")
    if np.any(values["completed"] < p["requests"]):
        lost = int(np.sum(p["requests"] - values["completed"]))
        print(f"warning: {lost:,} requests did not complete; times describe the others")
    found = Findings([(arm.group, arm.name) for arm in compared], values, p["baselines"])
    for group in found.groups():
        print("\n" + table(found.rows(group), title=found.title(group)))
    for sentence in found.sentences():
        print(f"* {sentence}")
    if run.workdir:
        found.write(run.workdir, p, run.provenance)
        print(f"\nwrote {run.workdir}/report.html")


if __name__ == "__main__":
    harness.run(main, config="configs/compare_policies.py")
