"""Mixture of experts: a square-root softplus router and gated experts, one of them shared by all.

score_e = sqrt(softplus(router_e . x)); the bias only helps to choose; the weights of the chosen are
their scores, normed to `routed_scaling`. An expert: down(w silu(min(gate, c)) clip(up, -c, c)).
`grouped` costs what the chosen experts cost: tokens are sorted by expert, and each expert that was
chosen is read once and multiplies its own rows, a block at a time.
Source: released DeepSeek-V4.1 `inference/model.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import linear
from deepinfer_jax.parallel.exchange import exchange
from deepinfer_jax.parallel.mesh import ALONE, Parallel
from pallas_kernels.grouped_matmul.api import gated, grouped_matmul
from pallas_kernels.grouped_matmul.weights import Weights

MIN_BLOCK, MAX_BLOCK = 16, 64  # rows an expert multiplies at a time
COPY_STRIDE = 23333  # spreads the rows of a step over the copies of an expert


def moe(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    valid: jax.Array,
    is_image: jax.Array,
    active: int,
    parallel: Parallel = ALONE,
    kernels: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """The layer's output [S, Q, D] and how many of these rows each expert got, int32 [E].

    Args:
      x: normed input [S, Q, D].
      valid: bool [S, Q]; other rows visit no routed expert.
      is_image: bool [S, Q]; they are routed under `bias_image`.
      active: experts per token.
      parallel: the ranks that share the experts' weights.
      kernels: who multiplies, one of `pallas_kernels.choice.KERNELS`.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen, weight = route(params, config, flat, is_image.reshape(-1), active)
    count = params["router"].shape[0]
    chosen = jnp.where(valid.reshape(-1, 1), chosen, count)
    if parallel.experts:
        routed = _elsewhere(params, config, flat, chosen, weight, parallel, kernels)
    else:
        routed = grouped(params, config, flat, _slots(params, chosen, 0), weight, kernels)
    hidden = _activate(linear(flat, params["shared_gate_up"]), config, None)
    shared = linear(hidden, params["shared_down"], jnp.dtype(jnp.float32))
    visits = jnp.zeros(count, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    return (routed + shared).astype(x.dtype).reshape(x.shape), visits


def route(
    params: dict[str, Any], config: ModelConfig, x: jax.Array, is_image: jax.Array, active: int
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts int32 [T, k] and their float32 weights [T, k]; ties to the lowest id."""
    scores = jnp.sqrt(jax.nn.softplus(linear(x, params["router"], jnp.dtype(jnp.float32))))
    bias = jnp.where(is_image[:, None], params["bias_image"], params["bias"])
    _, chosen = jax.lax.top_k(scores + bias, active)
    weight = jnp.take_along_axis(scores, chosen, axis=-1)
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    return chosen, weight * config.routed_scaling


def _slots(params: dict[str, Any], chosen: jax.Array, rank: jax.Array | int) -> jax.Array:
    """Physical slots of chosen experts int32 [T, k]: the experts themselves, or a copy of each.

    The copy depends on rank and row alone. Source: the released DeepInfer 0.1.0.
    """
    if "placement" not in params:
        return chosen
    table, replicas = params["placement"]["table"], params["placement"]["replicas"]
    expert = jnp.minimum(chosen, replicas.shape[0] - 1)
    row = jnp.arange(chosen.shape[0], dtype=jnp.int32)[:, None]
    found = table[expert, (rank + COPY_STRIDE * row) % replicas[expert]]
    slots = replicas.shape[0] + table.shape[1] - 1
    return jnp.where(chosen < replicas.shape[0], found, slots)


def _elsewhere(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    parallel: Parallel,
    kernels: str,
) -> jax.Array:
    """As `grouped`, each expert on the rank that holds it. x [T, D]; chosen and weight [T, k]."""
    active, local = chosen.shape[1], params["gate_up"].shape[0]
    slots = _slots(params, chosen, jax.lax.axis_index(parallel.experts))

    def compute(rows: jax.Array, slot: jax.Array, scale: jax.Array) -> jax.Array:
        return grouped(params, config, rows, slot[:, None], scale[:, None], kernels)

    made = exchange(
        jnp.repeat(x, active, axis=0),
        slots.reshape(-1),
        weight.reshape(-1),
        compute,
        axes=parallel.experts,
        local_slots=local,
        capacity=parallel.capacity,
        ragged=parallel.ragged,
    )
    return made.reshape(*chosen.shape, -1).sum(1)


def grouped(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    kernels: str = "xla",
) -> jax.Array:
    """float32 [T, D]: each token's experts, weighted and summed; an expert id of E is nobody.

    Args:
      params: `gate_up` and `down` of E experts, or of E slots that hold some.
      x: [T, D].
      chosen: int32 [T, k].
      weight: float32 [T, k].
      kernels: see `moe`.
    """
    tokens, active = chosen.shape
    experts = params["gate_up"].shape[0]
    size = block_size(tokens * active, experts)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    padded = jnp.pad(order, (0, size))
    sizes = jnp.zeros(experts, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(chosen.shape)
    if kernels != "xla":
        made = _by_kernels(params, config, x[order // active], sizes, weight, order, kernels)
        return jnp.where((chosen < experts)[..., None], made[rank], 0).sum(1)
    ends = jnp.cumsum(sizes)

    def visit(made: jax.Array, e: jax.Array) -> jax.Array:
        """Rows of `made`, ordered by expert, from those of expert e on."""
        gate_up, down = params["gate_up"][e], params["down"][e]

        def block(i: jax.Array, made: jax.Array) -> jax.Array:
            at = ends[e] - sizes[e] + i * size
            pair = jax.lax.dynamic_slice_in_dim(padded, at, size)
            hidden = linear(x[pair // active], gate_up)
            hidden = _activate(hidden, config, weight.reshape(-1)[pair])
            new = linear(hidden, down, jnp.dtype(jnp.float32))
            return jax.lax.dynamic_update_slice_in_dim(made, new, at, axis=0)

        return jax.lax.fori_loop(0, -(-sizes[e] // size), block, made)

    def one(made: jax.Array, e: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(sizes[e] > 0, visit, lambda made, _: made, made, e), None

    # A block's rows behind its expert's are other experts'; those write them again, in their turn.
    made = jnp.zeros((tokens * active + size, x.shape[1]), jnp.float32)
    made = jax.lax.scan(one, made, jnp.arange(experts))[0]
    return jnp.where((chosen < experts)[..., None], made[rank], 0).sum(1)


def _by_kernels(
    params: dict[str, Any],
    config: ModelConfig,
    rows: jax.Array,
    sizes: jax.Array,
    weight: jax.Array,
    order: jax.Array,
    kernels: str,
) -> jax.Array:
    """float32 [T k, D]: experts of rows [T k, D], sorted by expert as `order` says."""
    hidden = gated(
        rows,
        Weights(params["gate_up"]),
        sizes,
        weight.reshape(-1)[order],
        config.swiglu_limit,
        kernels=kernels,
    )
    return grouped_matmul(hidden, Weights(params["down"]), sizes, kernels=kernels)


def block_size(pairs: int, experts: int) -> int:
    """The power of two nearest below an expert's fair share, at most MAX_BLOCK; or a row at a time.

    XLA:CPU multiplies few rows hardly faster than MIN_BLOCK; one row runs at the rate of the reads.
    """
    fair = pairs // experts
    return 1 if fair < MIN_BLOCK else min(MAX_BLOCK, 1 << (fair.bit_length() - 1))


def _activate(gate_up: jax.Array, config: ModelConfig, scale: jax.Array | None) -> jax.Array:
    """scale silu(min(gate, c)) clip(up, -c, c) in float32, back in the dtype of gate_up."""
    limit = config.swiglu_limit
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return (hidden if scale is None else hidden * scale[:, None]).astype(gate_up.dtype)
