"""A mesh device of shapes only: its steps are lowered for devices that need not be there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.engine import pack
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.flat import Layout
from deepinfer_jax.engine.mesh_device import MeshDevice
from deepinfer_jax.engine.mesh_programs import empty_state, step_programs
from deepinfer_jax.engine.programs import rehearsals
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams
from deepinfer_jax.model.placing import abstract_on_mesh, partition_specs
from deepinfer_jax.parallel.mesh import RANKS, ranks


class PlannedDevice(MeshDevice):
    """A `MeshDevice` whose programs are lowered where they would run.

    Its params and state are shapes with shardings. `traced` and `lowered` have each program's newest
    form, with every weight as an argument whether the program reads it or not, for all lie there.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        mesh: Mesh,
        *,
        buckets: pack.Buckets | None = None,
        limits: SamplingLimits | None = None,
        format: str = "bytes",
        dtype: DTypeLike = jax.numpy.bfloat16,
        token_map: Any = None,
        extra_experts: int = 0,
        window: int = 0,
        capacity: int = 0,
        ragged: bool = False,
    ) -> None:
        """As of `MeshDevice`; `mesh` may be of the devices of a compiler's topology."""
        self.model, self.config, self.mesh = model, config, mesh
        self.limits, self.ranks = limits or SamplingLimits(), ranks(mesh)
        self.buckets = buckets or pack.Buckets.of(config)
        self.buckets.check(config)
        self.widths = self.buckets.widths or (config.step_rows,)
        self.params = abstract_on_mesh(model, mesh, extra_experts, dtype)
        self.place = NamedSharding(mesh, RANKS)
        self.programs = step_programs(
            model,
            config,
            mesh,
            partition_specs(self.params, model),
            alternatives=self.limits.logprobs,
            token_map=token_map,
            capacity=capacity,
            ragged=ragged,
            keep_unused=True,
        )
        shapes = jax.eval_shape(
            empty_state(
                model,
                config,
                mesh,
                rows=self.buckets.rows,
                format=format,
                dtype=dtype,
                window=window,
            )
        )
        self.state = jax.tree.map(self._placed, shapes)
        self.lowered: dict[str, Any] = {}
        self.traced: dict[str, Any] = {}

    def lower(self) -> dict[str, Any]:
        """The largest prompt and decode steps, and the sampling behind the decode step, lowered."""
        greedy = Answer(SamplingParams(temperature=0.0), seed=0)
        for plan in rehearsals(self.config, self.buckets, self.widths):
            plans = [plan] * self.ranks
            requests = [[Request(-1, [0], sampling=greedy) for _ in plan.rows]] * self.ranks
            self.forward(plans, requests)
            if not plan.is_prompt:
                self.sample(plans, requests)
        return self.lowered

    def queue(self, name: str, layout: Layout, *arguments: Any) -> Any:
        """Lower a program instead of running it."""
        params, state, flat = arguments
        shape = self._placed(jax.ShapeDtypeStruct(np.shape(flat), flat.dtype))
        program: Any = self.programs[name]  # jitted, so that it can be traced
        self.traced[name] = program.trace(layout, params, state, shape)
        self.lowered[name] = self.traced[name].lower()
        return (state, None) if name == "sample" else state

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.place)
