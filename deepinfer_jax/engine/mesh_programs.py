"""The programs of a mesh's steps, from shapes alone: for a `MeshDevice`, or to be compiled without one.

A rank's step becomes one of all ranks under `jax.shard_map`. State and batches have a rank axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.config import EngineConfig, ModelConfig, Role
from deepinfer_jax.engine.device_state import create_state
from deepinfer_jax.engine.flat import Layout
from deepinfer_jax.engine.step import Step
from deepinfer_jax.model.numerics import RELEASED, Numerics
from deepinfer_jax.parallel.mesh import CONTEXT, DIVIDED, RANKS, ranks
from deepinfer_jax.rules import require

Tree = Any


def step_programs(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    specs: Tree,
    *,
    alternatives: int,
    numerics: Numerics = RELEASED,
    token_map: Any = None,
    capacity: int = 0,
    ragged: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Jitted (layout, params, state, flat) by name: prompt, decode, sample, remember.

    Args:
      specs: `PartitionSpec` of every weight.
      alternatives: log-probabilities reported per token.
      capacity, ragged: see `parallel.mesh.Parallel`.
      options: of `jax.jit`.

    Raises:
      ValueError: a context for an engine that reads no prompts.
    """
    context = (CONTEXT,) if mesh.shape[CONTEXT] > 1 else ()
    require(
        not context or config.role != Role.COMPLETION,
        f"a context of {mesh.shape[CONTEXT]} devices, but a completion engine reads no prompts "
        "to divide; give it a context of 1",
    )
    parallel = dataclasses.replace(DIVIDED, capacity=capacity, ragged=ragged, context=context)
    step = Step(model, config, alternatives, numerics, token_map, parallel)

    def prompt(params: Tree, state: Tree, batch: Tree) -> Tree:
        return step.read_prompt(params, state, batch)[0]

    def remember(_: Tree, state: Tree, tenant: Tree) -> Tree:
        return step.remember(state, tenant)

    place = NamedSharding(mesh, RANKS)
    fetched = NamedSharding(mesh, PartitionSpec()) if mesh.is_multi_process else place
    made = functools.partial(jax.jit, static_argnums=0, donate_argnums=2, **options)
    steps = {
        "prompt": prompt,
        "decode": step.read_decode,
        "sample": step.sample,
        "remember": remember,
    }
    return {  # out_shardings: equal meshes have many names, each a program of its own
        name: made(
            _together(mesh, specs, one),
            out_shardings=(place, fetched) if name == "sample" else place,
        )
        for name, one in steps.items()
    }


def empty_state(
    model: ModelConfig, config: EngineConfig, mesh: Mesh, **settings: Any
) -> Callable[[], Tree]:
    """A function that makes the states of all ranks; `settings` are keywords of `create_state`."""
    make = functools.partial(create_state, model, config, **settings)
    return lambda: jax.tree.map(lambda *xs: jnp.stack(xs), *[make()] * ranks(mesh))


def _together(mesh: Mesh, specs: Tree, step: Callable[..., Tree]) -> Callable[..., Tree]:
    """A rank's step (params, state, batch) as one (layout, params, state, flat) of all ranks."""

    def all_ranks(layout: Layout, params: Tree, state: Tree, flat: jax.Array) -> Tree:
        def mine(params: Tree, state: Tree, flat: jax.Array) -> Tree:
            own = jax.tree.map(lambda x: x[0], state)
            return jax.tree.map(lambda x: x[None], step(params, own, layout.restored(flat[0])))

        return jax.shard_map(
            mine, mesh=mesh, in_specs=(specs, RANKS, RANKS), out_specs=RANKS, check_vma=False
        )(params, state, flat)

    return all_ranks
