r"""Finds the cheapest prompt and decode engines that meet latency objectives, and says why less fails.

  python -m experiments.search_capacity --config=configs/search_capacity.py --workdir=runs/capacity
  python -m experiments.search_capacity --config.prices.H200=2.2 --config.slo.ttft=1.0

A candidate is a number of prompt engines on one hardware and of decode engines on another. All
candidates serve the same requests (several draws of them) in one compiled call: an engine that a
candidate does not have is parked in a tier of the queue that no request is long enough for. A
candidate meets the objectives if the share of requests within them, less its 95 % half-width over
the draws, reaches `attainment`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.report.table import quantity, table
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.traces import LARGEST_LENGTH
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.workload import Workload, workload
from experiments import batch, harness
from experiments.capacity_findings import Candidate, Findings

SECTIONS = ("model", "cost", "memory", "links", "prefill", "decode")


def clusters(parameters: Mapping[str, Any], seed: int) -> dict[str, ClusterConfig]:
    """One prompt and one decode engine on each hardware of `prices`, for their coefficients."""
    found = {}
    for name in parameters["prices"]:
        values = {section: parameters[section] for section in SECTIONS if section in parameters}
        values["engines"] = {**parameters["engines"], "prompt": 1, "completion": 1}
        values["hardware"] = "" if parameters["cost"]["kind"] == "seconds" else name
        found[name] = translate(service(values), seed).cluster
    return found


def combined(prompt: ClusterConfig, decode: ClusterConfig, forms: int) -> StepCost:
    """Prefill steps of one cluster and decode steps of another, as `forms` decode forms."""
    rows = np.asarray(decode.cost.decode_forms)
    rows = np.concatenate([rows, np.repeat(rows[-1:], forms - len(rows), axis=0)])
    return dataclasses.replace(
        prompt.cost,
        decode_forms=rows,
        decode_exchange_base=decode.cost.decode_exchange_base,
        decode_exchange_row=decode.cost.decode_exchange_row,
    )


def sized(base: ClusterConfig, prompt: int, decode: int, total: int, quota: int) -> ClusterConfig:
    """`prompt` and `decode` engines at work; the rest of `total` + 1 parked in a tier of their own."""
    parked = total + 1 - prompt - decode
    return dataclasses.replace(
        base,
        modes=(Mode.PROMPT,) * (prompt + parked) + (Mode.COMPLETION,) * decode,
        tier_edges=(LARGEST_LENGTH + 1,),
        tier_engines=(prompt, parked),
        tier_quota=(quota, FOREVER),
    )


def candidates(
    parameters: Mapping[str, Any], seed: int
) -> tuple[list[Candidate], list[ClusterConfig]]:
    """Every combination of hardware and engine counts, cheapest first."""
    by_name, e = clusters(parameters, seed), parameters["engines"]
    forms = max(len(c.cost.decode_forms) for c in by_name.values())
    quota = round(parameters["quota_seconds"] * 1e9)
    prompts, decodes = (parameters["search"][k] for k in ("prompt_engines", "decode_engines"))
    sizes = itertools.product(range(1, prompts + 1), range(1, decodes + 1))
    pairs = []
    for (n, m), a, b in itertools.product(sizes, by_name, by_name):
        cost = combined(by_name[a], by_name[b], forms)
        base = dataclasses.replace(by_name[a], cost=cost, kv_blocks=by_name[b].kv_blocks)
        price = e["ranks"] * (n * parameters["prices"][a] + m * parameters["prices"][b])
        one = Candidate(a, n, b, m, n * e["ranks"], m * e["ranks"], price)
        pairs.append((one, sized(base, n, m, prompts + decodes, quota)))
    pairs.sort(key=lambda pair: (pair[0].price, pair[0].gpus, pair[0].name))
    return [one for one, _ in pairs], [made for _, made in pairs]


def draws(parameters: Mapping[str, Any], seed: int) -> list[Workload]:
    """The offered requests, drawn `draws` times with Poisson arrivals at `rate`."""
    found = []
    described = source(parameters["workload"])
    for k in range(parameters["draws"]):
        base = workload(described.trace(seed * parameters["draws"] + k))
        arrival = base.arrival
        if parameters["rate"]:
            generator = np.random.default_rng([seed, k])
            gaps = generator.exponential(1 / parameters["rate"], base.requests)
            arrival = np.rint(np.cumsum(gaps) * 1e9).astype(np.int64)
        found.append(dataclasses.replace(base, arrival=arrival))
    return found


def reduce(run: Trajectory, *, slo: metrics.Slo, warmup: float) -> dict[str, Any]:
    """One run's numbers inside the compiled program.

    Args:
      warmup: share of the arrivals that is left out.
    """
    t = run.requests
    kept = jnp.arange(len(t.arrival)) >= int(warmup * len(t.arrival))
    total = jnp.sum(kept)
    share = lambda **limit: jnp.sum(metrics.meets(t, metrics.Slo(**limit)) & kept) / total  # noqa: E731
    span = (jnp.max(jnp.where(kept, t.finish, 0)) - t.arrival[0]) / metrics.NANOSECONDS_PER_SECOND
    good = jnp.sum(jnp.where(metrics.meets(t, slo) & kept, t.output_tokens, 0))
    return {
        "within": share(ttft=slo.ttft, tpot=slo.tpot),
        "within_ttft": share(ttft=slo.ttft),
        "within_tpot": share(tpot=slo.tpot),
        "busy": run.busy[:, 1:3] / run.end,  # [M, 2] prefill, decode
        "good_tokens_per_second": good / span,
    }


def measure(
    parameters: Mapping[str, Any], made: Sequence[ClusterConfig], loads: Sequence[Workload]
) -> dict[str, np.ndarray]:
    """`reduce` of every candidate and draw, [C, K] each, in one compiled call."""
    slo = metrics.Slo(**parameters["slo"])
    parts = [
        split(dataclasses.replace(c, seed=c.seed + k if c.nextn else c.seed), load)
        for c in made
        for k, load in enumerate(loads)
    ]
    which = [k for _ in made for k in range(len(loads))]
    found = batch.many(
        parts[0][0],
        [scenario for _, scenario in parts],
        loads,
        which,
        lambda run: reduce(run, slo=slo, warmup=parameters["warmup_share"]),
        quick=parameters["compile"] == "quick",
    )
    grid = (len(made), len(loads))
    return {name: value.reshape(grid + value.shape[1:]) for name, value in found.items()}


def engines_busy(found: Mapping[str, np.ndarray], tried: Sequence[Candidate]) -> dict[str, Any]:
    """Mean share of time at work of each candidate's prompt and decode engines, [C, K]."""
    busy = found["busy"].sum(axis=2)  # [C, K, 2]
    counts = np.asarray([(c.prompt_engines, c.decode_engines) for c in tried])
    return {
        "prompt_busy": busy[..., 0] / counts[:, None, 0],
        "decode_busy": busy[..., 1] / counts[:, None, 1],
    }


def main(run: harness.Run) -> None:
    p = run.parameters
    tried, made = candidates(p, run.seed)
    loads = draws(p, run.seed)
    print(
        f"{len(tried):,} candidates x {len(loads)} draws of {loads[0].requests:,} requests: "
        f"{len(tried) * len(loads):,} scenarios in one call ..."
    )
    with batch.waiting("compiling and simulating"):
        values = measure(p, made, loads)
    values |= engines_busy(values, tried)
    del values["busy"]
    found = Findings(tried, values, p)
    print("\n" + table(found.rows(), title=found.title()))
    for sentence in found.sentences():
        print(f"* {sentence}")
    if run.workdir:
        found.write(run.workdir, run.provenance)
        print(f"\nwrote {run.workdir}/report.html")
    if found.winner() is None:
        print(f"no candidate reaches {quantity(p['attainment'], '%')}: raise search.*_engines")


if __name__ == "__main__":
    harness.run(main, config="configs/search_capacity.py")
