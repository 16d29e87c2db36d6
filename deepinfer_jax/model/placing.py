"""Weights onto a mesh: experts into slots, tables cut into equal shares, the rest on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import abstract, partitions
from deepinfer_jax.parallel.mesh import RULES, expert_ranks, put
from deepinfer_jax.policy.experts import initial_placement
from deepinfer_jax.rules import require

Params = dict[str, Any]
STACKED = ("gate_up", "down")  # weights with an entry per expert


def slots_of(experts: int, extra: int, engines: int) -> int:
    """Expert slots of a layer: its experts and `extra` copies, rounded up to fill all ranks alike.

    Raises:
      ValueError: fewer slots than ranks cannot be.
    """
    require(extra >= 0, f"{extra} redundant experts; give 0 or more")
    return -(-(experts + extra) // engines) * engines


def with_slots(params: Params, config: ModelConfig, engines: int, extra: int = 0) -> Params:
    """The weights with every layer's experts in slots: slot i holds expert i, then copies from 0 on.

    So have the stages of the drafter. `moe.placement` maps an expert to its slots.
    """

    def layer(weights: Params) -> Params:
        experts = weights["moe"]["router"].shape[0]
        slots = slots_of(experts, extra, engines)
        return {**weights, "moe": _spread(weights["moe"], experts, slots)}

    return _each_layer(params, layer)


def _spread(moe: Params, experts: int, slots: int) -> Params:
    placed = initial_placement(1, experts, slots)
    held = placed.physical_to_logical[0]
    stacked = {name: jnp.take(moe[name], held, axis=0) for name in STACKED}
    placement = {"table": placed.logical_to_physical[0], "replicas": placed.replicas[0]}
    return {**moe, **stacked, "placement": placement}


def on_mesh(params: Params, config: ModelConfig, mesh: Mesh, extra: int = 0) -> Params:
    """The weights, placed for `Parallel` steps: experts in slots, with copies, tables padded.

    Args:
      params: whole weights, as for one device.
      extra: redundant experts of each layer at least.
    """
    whole = spread(params, config, mesh, extra)
    specs = partition_specs(whole, config)
    return put(whole, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def abstract_on_mesh(
    config: ModelConfig, mesh: Mesh, extra: int = 0, dtype: DTypeLike = jnp.bfloat16
) -> Params:
    """What `on_mesh` would make of weights in a dtype: shapes and shardings, no arrays."""
    whole = jax.eval_shape(
        lambda params: spread(params, config, mesh, extra),
        abstract(model_parameters(config), dtype),
    )
    specs = partition_specs(whole, config)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        whole,
        specs,
    )


def spread(params: Params, config: ModelConfig, mesh: Mesh, extra: int = 0) -> Params:
    """The weights with experts in slots and tables padded, so that a mesh can divide them."""
    count, slotted = mesh.size, with_slots(params, config, expert_ranks(mesh), extra)

    def cut(weights: Params) -> Params:
        if "engram" not in weights:
            return weights
        table = weights["engram"]["table"]
        padded = jnp.pad(table, ((0, -table.shape[0] % count), (0, 0)))
        return {**weights, "engram": {**weights["engram"], "table": padded}}

    return {**slotted, "layers": tuple(cut(w) for w in slotted["layers"])}


def partition_specs(params: Params, config: ModelConfig) -> Params:
    """`PartitionSpec` of every weight of a tree with slots."""
    declared = partitions(model_parameters(config), RULES)

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        if "placement" in jax.tree_util.keystr(path):
            return PartitionSpec()
        found = declared
        for step in path:
            found = found[step.key if hasattr(step, "key") else step.idx]
        return found

    return jax.tree_util.tree_map_with_path(spec, params)


def _each_layer(params: Params, change: Callable[[Params], Params]) -> Params:
    """The tree with each layer, and each stage of the drafter, changed."""
    made = {**params, "layers": tuple(change(w) for w in params["layers"])}
    if "draft" in params:
        stages = tuple(change(w) for w in params["draft"]["layers"])
        made["draft"] = {**params["draft"], "layers": stages}
    return made
