"""Compile for accelerators that are not here: named TPU generations through libtpu's compiler.

Set JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1 before the process starts; one process at a time may
hold libtpu. The first compilation of a process costs some seconds.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def available() -> bool:
    """Whether a TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def _device(generation: str) -> Any:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[generation])
    return topology.devices[0]


def _pretend(kind: str, cores: int) -> Any:
    """A context in which Pallas lowers for a device of this kind."""
    device = AbstractDevice(kind, cores, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def compile_tpu(function: Callable[..., Any], generation: str, *arguments: Any) -> Any:
    """`function` compiled for one device of `generation`; arguments are ShapeDtypeStructs, row-major.

    Raises:
      ValueError: unknown generation.
      RuntimeError: as the compiler has it, for instance when a kernel does not fit into VMEM.
    """
    if generation not in TPUS:
        raise ValueError(f"generation is {generation!r}; choose one of {', '.join(TPUS)}")
    device = _device(generation)
    sharding = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    placed = jax.tree.map(lambda a: _row_major(a, sharding), arguments)
    with _pretend(device.device_kind, device.num_cores):
        lowered = jax.jit(function).lower(*placed)
    return lowered.compile()


def _row_major(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """As kernels want their operands; by default TPUs hold narrow arrays in other orders."""
    layout = Layout(tuple(range(len(a.shape))))
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=Format(layout, sharding))


def export_tpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` lowered for TPUs, without their compiler."""
    with _pretend("TPU v6e", 1):
        return jax.export.export(jax.jit(function), platforms=["tpu"])(*arguments)
