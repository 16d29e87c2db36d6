"""One compilation for many runs: other numbers and other requests of one shape."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.simulate import Prepared, prepare
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.workload import Workload


class Reusable:
    """Compiles a cluster once, quickly (its runs are several times slower), and runs its likes."""

    def __init__(self, cluster: ClusterConfig, load: Workload, exact: bool = True) -> None:
        options: dict[str, bool | str | int] = {"xla_backend_optimization_level": 0}
        self.prepared: Prepared = prepare(cluster, load, exact=exact, options=options)
        self.exact = exact
        self.shape = split(cluster, load, exact=exact)[0]

    def run(self, cluster: ClusterConfig, load: Workload) -> Trajectory:
        """A run whose books balance; the cluster and requests must have the compiled shape."""
        shape, scenario = split(cluster, load, exact=self.exact)
        assert shape == self.shape, "this cluster needs another compilation"
        kind = np.int64 if self.exact else np.float64
        load = dataclasses.replace(load, arrival=np.asarray(load.arrival, kind))
        with jax.enable_x64(True):
            arguments = jax.device_put((scenario, load))
        return dataclasses.replace(self.prepared, arguments=arguments).run()[0]
