"""Runs scenarios: one (`simulate`), one compiled and timed (`prepare`), many in one call (`sweep`).

`jax.enable_x64` is scoped to these functions; the rest of a process keeps its 32-bit types.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from deepinfer_jax.simulator import loop
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import Scenario, Shape, split
from deepinfer_jax.simulator.trajectory import Trajectory, balance, trajectory
from deepinfer_jax.simulator.workload import Workload

Metric = Callable[[Trajectory], Any]


def compiler_options() -> dict[str, bool | str | int]:
    """How the event loop is compiled: without fusion on CPU.

    A fused operation may read an array's old value after its new one is needed, which costs a copy
    of the array (see `inplace`). With XLA's `xla_cpu_small_while_loop_byte_threshold` raised through
    XLA_FLAGS (`experiments.runtime` does it) the whole loop becomes one native function besides.
    """
    return {"xla_disable_hlo_passes": "fusion"} if jax.default_backend() == "cpu" else {}


def _run(shape: Shape, scenario: Scenario, workload: Workload) -> Trajectory:
    return trajectory(shape, workload, loop.run(shape, scenario, workload))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A compiled scenario; `run()` simulates it."""

    executable: Any
    arguments: tuple[Scenario, Workload]
    compile_seconds: float

    def run(self) -> tuple[Trajectory, float]:
        """(the run as numpy arrays, seconds it took). Raises AssertionError if the books do not balance."""
        start = time.perf_counter()
        made = jax.block_until_ready(self.executable(*self.arguments))
        seconds = time.perf_counter() - start
        made = jax.tree.map(np.asarray, made)
        balance(made)
        return made, seconds


def prepare(
    cluster: ClusterConfig,
    workload: Workload,
    *,
    exact: bool = True,
    options: dict[str, bool | str | int] | None = None,
) -> Prepared:
    """Compiles `cluster` serving `workload`.

    Args:
      exact: integer time (the default); False takes float64 time, which `jax.jvp` sees through.
      options: XLA options added to `compiler_options` (for example
        `{"xla_backend_optimization_level": 0}`: compiles three times faster, runs six times slower).

    Raises:
      ValueError: the cluster contradicts itself or names an unknown policy.
    """
    with jax.enable_x64(True):
        shape, arguments = numbers(cluster, workload, exact=exact)
        start = time.perf_counter()
        compiled = (
            jax.jit(
                functools.partial(_run, shape),
                compiler_options=compiler_options() | (options or {}),
            )
            .lower(*arguments)
            .compile()
        )
        return Prepared(compiled, arguments, time.perf_counter() - start)


def numbers(
    cluster: ClusterConfig, workload: Workload, *, exact: bool = True
) -> tuple[Shape, tuple[Scenario, Workload]]:
    """(what selects the program, its arguments); equal shapes may share one `Prepared.executable`."""
    with jax.enable_x64(True):
        shape, scenario = split(cluster, workload, exact=exact)
        return shape, jax.device_put((scenario, _times(workload, exact)))


def simulate(cluster: ClusterConfig, workload: Workload, *, exact: bool = True) -> Trajectory:
    """One run of `cluster` serving `workload`, checked for conservation. See `prepare`."""
    return prepare(cluster, workload, exact=exact).run()[0]


def _times(workload: Workload, exact: bool) -> Workload:
    kind = np.int64 if exact else np.float64
    after = workload.after
    if after is not None:
        after = dataclasses.replace(after, delay=np.asarray(after.delay, kind))
    return dataclasses.replace(workload, arrival=np.asarray(workload.arrival, kind), after=after)


def sweep(
    clusters: Sequence[ClusterConfig],
    workloads: Workload | Sequence[Workload],
    metric: Metric,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Any:
    """`metric` of many scenarios in one call and one compilation.

    Scenarios run one after the other on each device (the loop ends at a different time in each, so
    lanes of one vectorised loop would wait for the longest) and side by side on `devices`.

    Args:
      clusters: [K]; they may differ in every number but not in what `scenario.Shape` holds.
      workloads: one for all, or K with equal numbers of requests and segments.
      metric: jit-able reduction of a run to a pytree.
      devices: default: the first device of the backend.

    Returns:
      The metric's pytree of numpy arrays with a leading axis K.

    Raises:
      ValueError: the clusters do not share a shape; the message names the fields.
    """
    with jax.enable_x64(True):
        shared = isinstance(workloads, Workload)
        each: list[Any] = [workloads] * len(clusters) if shared else list(workloads)  # type: ignore
        parts = [split(cluster, load) for cluster, load in zip(clusters, each, strict=True)]
        shape = _one_shape([shape for shape, _ in parts])
        scenarios = jax.tree.map(lambda *x: np.stack(x), *[scenario for _, scenario in parts])
        loads = None if shared else jax.tree.map(lambda *x: np.stack(x), *each)

        def one(numbers: tuple[Scenario, Workload | None]) -> Any:
            scenario, load = numbers
            return metric(_run(shape, scenario, workloads if load is None else load))  # type: ignore[arg-type]

        mapped = jax.jit(lambda x: lax.map(one, x), compiler_options=compiler_options())
        chosen = list(devices or jax.devices()[:1])
        bounds = np.linspace(0, len(clusters), len(chosen) + 1).astype(int)
        running = [
            mapped(
                jax.device_put(jax.tree.map(lambda x, a=a, b=b: x[a:b], (scenarios, loads)), device)
            )
            for device, a, b in zip(chosen, bounds[:-1], bounds[1:], strict=True)
            if b > a
        ]
        return jax.tree.map(lambda *x: np.concatenate([np.asarray(y) for y in x]), *running)


def _one_shape(shapes: Sequence[Shape]) -> Shape:
    different = [
        field.name
        for field in dataclasses.fields(Shape)
        if len({getattr(shape, field.name) for shape in shapes}) > 1
    ]
    if different:
        raise ValueError(
            f"scenarios of one sweep differ in {', '.join(different)}, which selects the compiled "
            "program: run one sweep for each value"
        )
    return shapes[0]
