"""The mesh of an engine, and which logical axes of weights its axes divide.

Attention is data parallel: each engine rank has its own sequences, slots and blocks, and a copy of
every weight that is not an expert's or a row of an Engram table. The same devices divide the experts
(DP = EP): an expert group is a set of engines that together hold each expert. Engram tables are
divided over all devices. An engine rank may be several devices, its context: they keep the same
memory and divide the rows of prompts (`context`). Source: the released DeepInfer 0.1.0; the chapter, section 11.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec, Sharding

from deepinfer_jax.rules import require

GROUP, ENGINE, CONTEXT = "group", "engine", "context"
AXES = (GROUP, ENGINE, CONTEXT)
EXPERTS = (ENGINE, CONTEXT)
"""The axes over which an expert group divides its experts."""
RANKS = PartitionSpec((GROUP, ENGINE))
"""Of arrays with one entry per engine rank."""

RULES: dict[str, str | tuple[str, ...]] = {"experts": EXPERTS, "engram_rows": AXES}
"""Mesh axes by logical axis (`model.parameters.partitions`); all else is replicated."""


@dataclasses.dataclass(frozen=True)
class Parallel:
    """What a step, traced for one rank, must know of the others. The default: there are none.

    `experts` and `engram` name the mesh axes over which expert slots and table rows are divided,
    `context` those over which the rows of a step are.
    """

    experts: tuple[str, ...] = ()
    engram: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    capacity: int = 0  # rows one rank sends another at a time; 0: `exchange.fair_capacity`
    ragged: bool = False  # rows travel as many as there are, where the platform can


ALONE = Parallel()
SPREAD = Parallel(experts=EXPERTS, engram=AXES)
"""For steps under `jax.shard_map` over the mesh; ranks of a context repeat each other's work."""
DIVIDED = dataclasses.replace(SPREAD, context=(CONTEXT,))
"""The same for prompts, whose rows the ranks of a context divide."""


def make_mesh(
    groups: int, engines: int, devices: Sequence[Any] | None = None, context: int = 1
) -> Mesh:
    """A mesh of groups x engines ranks of `context` devices each.

    Args:
      groups: expert groups; each holds every expert.
      engines: ranks of a group.
      devices: as many; by default the first ones there are.
      context: devices of a rank, which divide the rows of prompts.

    Raises:
      ValueError: too few devices.
    """
    known = list(jax.devices() if devices is None else devices)
    shape = (groups, engines, context)
    count = math.prod(shape)
    require(
        min(shape) > 0 and count <= len(known),
        f"{groups} groups of {engines} engines with a context of {context} on {len(known)} devices; "
        "give each of them a device "
        "(on CPU: XLA_FLAGS=--xla_force_host_platform_device_count=N)",
    )
    return Mesh(np.array(known[:count]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def put(tree: Any, shardings: Any) -> Any:
    """Arrays of the host onto devices, also of other processes, each of which has the same arrays.

    Args:
      tree: whole arrays.
      shardings: one of all, or a tree of theirs.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def one(leaf: Any, sharding: Sharding) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(one, tree, shardings)


def ranks(mesh: Mesh) -> int:
    """Engine ranks of a mesh."""
    return mesh.shape[GROUP] * mesh.shape[ENGINE]


def expert_ranks(mesh: Mesh) -> int:
    """Devices that divide the experts of a group."""
    return math.prod(mesh.shape[axis] for axis in EXPERTS)
