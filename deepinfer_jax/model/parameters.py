"""Every weight declared once: shape, dtype, logical axes and initialiser, in one tree.

From that tree come the abstract weights (`abstract`), their placement on a mesh (`shardings`) and
random ones (`initialise`). Linear weights are [out, in], as released. Names of axes are logical;
which mesh axis each maps to is the caller's rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Tree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight. `init` is "normal" (variance 1 / fan-in, or 1 for a table), "ones" or "zeros"."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    dtype: DTypeLike | None = None  # None: the model's parameter dtype
    fan_in: int | None = None  # None: the last axis

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"a weight of shape {self.shape} has axes {self.axes}; name each dimension"
            )


def is_leaf(node: object) -> bool:
    """True for a declaration: the leaves of a declared tree."""
    return isinstance(node, Leaf)


_map = functools.partial(jax.tree.map, is_leaf=is_leaf)


def abstract(tree: Tree, dtype: DTypeLike = jnp.bfloat16) -> Tree:
    """`jax.ShapeDtypeStruct` for every declaration."""
    return _map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype), tree)


def partitions(tree: Tree, rules: Mapping[str, str | tuple[str, ...] | None]) -> Tree:
    """`PartitionSpec` for every declaration; an axis without a rule is replicated.

    Raises:
      ValueError: two axes of one weight map to one mesh axis.
    """

    def spec(leaf: Leaf) -> PartitionSpec:
        names = [rules.get(axis) if axis else None for axis in leaf.axes]
        flat = [n for name in names for n in ((name,) if isinstance(name, str) else name or ())]
        if len(flat) != len(set(flat)):
            raise ValueError(
                f"axes {leaf.axes} map to {names}; one mesh axis may cut a weight once, so change "
                "the rules"
            )
        return PartitionSpec(*names)

    return _map(spec, tree)


def shardings(tree: Tree, mesh: Mesh, rules: Mapping[str, str | tuple[str, ...] | None]) -> Tree:
    """`NamedSharding` on `mesh` for every declaration."""
    return jax.tree.map(
        functools.partial(NamedSharding, mesh),
        partitions(tree, rules),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def initialise(tree: Tree, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Tree:
    """Random weights; each depends on `key` and on its own place in the tree only."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure, [_draw(leaf, k, dtype) for leaf, k in zip(leaves, keys, strict=True)]
    )


def _draw(leaf: Leaf, key: jax.Array, dtype: DTypeLike) -> jax.Array:
    dtype = leaf.dtype or dtype
    if leaf.init != "normal":
        return jnp.full(leaf.shape, {"ones": 1, "zeros": 0}[leaf.init], dtype)
    scale = (leaf.fan_in or leaf.shape[-1]) ** -0.5
    return (scale * jax.random.normal(key, leaf.shape, jnp.float32)).astype(dtype)


def count(tree: Tree) -> int:
    """Numbers in all weights of a declared tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_leaf))
