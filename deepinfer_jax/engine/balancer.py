"""Experts moved between the ranks of a running group, by what its newest decode steps routed.

The peak-aware policy of the released engine decides, layer by layer; weights move in place between
two steps, and the maps change with them: no step sees half a move. Answers stay the same bits, for a
token's experts are summed where the token is. Stages of the drafter stay where they are.
Source: the released DeepInfer 0.1.0; `policy.experts`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.engine.mesh_device import MeshDevice
from deepinfer_jax.model.placing import STACKED
from deepinfer_jax.parallel.mesh import EXPERTS, expert_ranks, put
from deepinfer_jax.parallel.movement import Moves, move, plan
from deepinfer_jax.policy.experts import (
    Placement,
    from_slots,
    rank_loads,
    ratio_of_sums,
    rebalance_peak_aware,
)
from deepinfer_jax.rules import require


@dataclasses.dataclass(frozen=True)
class Balance:
    """What a rebalance did. A ratio is sum of means / sum of maxima over layers, 1 at best."""

    before: float  # of the counted rows under the old placement
    after: float  # of the same rows under the new one
    moved: int  # slots whose expert changed, over all layers


class Balancer:
    """Counts and moves of one `MeshDevice`."""

    def __init__(self, device: MeshDevice) -> None:
        """Where experts are now.

        Raises:
          ValueError: the device counts no routing.
        """
        require(
            device.state.visits.shape[1] > 0,
            "the device counts no routing; give MeshDevice a window of decode steps",
        )
        self.device, self.engines = device, expert_ranks(device.mesh)
        slots = device.params["layers"][0]["moe"]["gate_up"].shape[0]
        experts = device.model.num_experts
        held = np.arange(slots, dtype=np.int32) % experts
        self.held = np.tile(held, (device.model.num_layers, 1))  # expert of each slot [L, slots]
        parts = Moves(
            local=PartitionSpec(EXPERTS),
            outgoing=PartitionSpec(),
            incoming=PartitionSpec(EXPERTS),
        )
        self._parts = jax.tree.map(lambda part: NamedSharding(device.mesh, part), parts)
        self._everywhere = NamedSharding(device.mesh, PartitionSpec())
        step = jax.shard_map(
            functools.partial(move, axes=EXPERTS),
            mesh=device.mesh,
            in_specs=(PartitionSpec(EXPERTS), parts),
            out_specs=PartitionSpec(EXPERTS),
            check_vma=False,
        )
        self._move = jax.jit(step, donate_argnums=0)
        self._sum = jax.jit(lambda visits: visits.sum(0), out_shardings=self._everywhere)

    def counts(self) -> np.ndarray:
        """Rows that each expert got, int64 [steps, L, E], all ranks together; waits for the device.

        Steps in which nobody decoded are left out, and so are those not made yet.
        """
        visits = np.asarray(self._sum(self.device.state.visits)).astype(np.int64)
        return visits[visits.any(axis=(1, 2))]

    def rebalance(self) -> Balance:
        """Move experts to where the counted steps would have had the smallest peaks.

        To be called between two calls of a loop. Without counts nothing moves.
        """
        counts, experts = self.counts(), self.device.model.num_experts
        old, weight = self.held, jnp.asarray(counts.sum(0), jnp.float32)
        if not len(counts):
            return Balance(1.0, 1.0, 0)
        placement = rebalance_peak_aware(jnp.asarray(counts), old.shape[1], self.engines)
        new = np.asarray(placement.physical_to_logical)
        layers = tuple(
            self._moved(weights, list(before), list(after), placement, i)
            for i, (weights, before, after) in enumerate(
                zip(self.device.params["layers"], old.tolist(), new.tolist(), strict=True)
            )
        )
        self.device.params = {**self.device.params, "layers": layers}
        self.held = new
        loads = (
            rank_loads(weight, place, self.engines)
            for place in (from_slots(jnp.asarray(old), experts), placement)
        )
        before, after = (float(ratio_of_sums(load)) for load in loads)
        return Balance(before, after, int((old != new).sum()))

    def _moved(
        self,
        weights: dict[str, Any],
        old: list[int],
        new: list[int],
        placement: Placement,
        layer: int,
    ) -> dict[str, Any]:
        """A layer with its experts where `new` has them."""
        if old == new:
            return weights
        moves = put(plan(old, new, self.engines), self._parts)
        moe = weights["moe"]
        moved = {name: self._move(moe[name], moves) for name in STACKED}
        maps = {
            "table": placement.logical_to_physical[layer],
            "replicas": placement.replicas[layer],
        }
        placed = put(maps, self._everywhere)
        return {**weights, "moe": {**moe, **moved, "placement": placed}}
