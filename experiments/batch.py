"""Several clusters run one after the other, each program compiled once: what small studies share.

`run` compiles a handful of shapes side by side, and cases of equal shape share a program. `many`
takes thousands of scenarios of one shape that serve a few workloads, each stored once
(`simulate.sweep` stores one per scenario).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.simulator import loop, simulate
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import Scenario, Shape
from deepinfer_jax.simulator.trajectory import Trajectory, trajectory
from deepinfer_jax.simulator.workload import Workload
from experiments.simulation import waiting

QUICK: dict[str, bool | str | int] = {"xla_backend_optimization_level": 0}
"""XLA options of programs that run for less time than they compile."""


def run(
    cases: Mapping[Any, tuple[ClusterConfig, Workload]], *, quick: bool = True
) -> dict[Any, Trajectory]:
    """Every case's run by its name, as numpy arrays with balanced books.

    Args:
      cases: {name: (cluster, its requests)}.
      quick: compile fast and run slowly; the results are equal.
    """
    parts = {name: simulate.numbers(*case) for name, case in cases.items()}
    first: dict[Shape, tuple[ClusterConfig, Workload]] = {}
    for name, (shape, _) in parts.items():
        first.setdefault(shape, cases[name])
    options = QUICK if quick else None
    with (
        waiting(f"compiling {len(first)} program(s)"),
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        made = pool.map(lambda case: simulate.prepare(*case, options=options), first.values())
        programs = dict(zip(first, made, strict=True))
    found = {}
    for name, (shape, arguments) in parts.items():
        with waiting(f"simulating {name}"):
            found[name] = dataclasses.replace(programs[shape], arguments=arguments).run()[0]
    return found


def many(
    shape: Shape,
    scenarios: Sequence[Scenario],
    loads: Sequence[Workload],
    which: Sequence[int],
    metric: Callable[[Trajectory], Any],
    *,
    quick: bool = False,
) -> Any:
    """`metric` of every scenario in one call, one after the other; a pytree with a leading axis.

    Args:
      scenarios: [K], all of `shape`.
      loads: equally many requests and trie nodes each.
      which: [K] index of the load that a scenario serves.
      metric: jit-able reduction of a run.
    """
    options = simulate.compiler_options() | (QUICK if quick else {})
    with jax.enable_x64(True):
        stacked = jax.tree.map(lambda *x: np.stack(x), *scenarios)
        every = jax.tree.map(lambda *x: jnp.stack(x), *loads)

        def one(numbers: tuple[Scenario, Any]) -> Any:
            load = jax.tree.map(lambda x: x[numbers[1]], every)
            return metric(trajectory(shape, load, loop.run(shape, numbers[0], load)))

        mapped = jax.jit(lambda x: jax.lax.map(one, x), compiler_options=options)
        return jax.tree.map(np.asarray, mapped((stacked, np.asarray(which))))
