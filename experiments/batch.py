"""Several clusters run one after the other, each program compiled once: what small studies share.

`simulate.sweep` is for many scenarios of one shape; here a handful of shapes are compiled side by
side, and cases of equal shape share a program.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.simulator import simulate
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import Shape
from deepinfer_jax.simulator.trajectory import Trajectory
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
