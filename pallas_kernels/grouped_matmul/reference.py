"""What the op is. M rows sorted by expert, E experts, D inputs, I hidden, N outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.weights import Weights, unpack


def expert_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """int32 [rows]: the expert of each row, E behind the last expert's; sizes int32 [E]."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right").astype(jnp.int32)


def grouped_matmul(x: jax.Array, weights: Weights, sizes: jax.Array) -> jax.Array:
    """float32 [M, N]: row times its expert's matrix, transposed; zero behind the last expert's rows.

    Args:
      x: [M, D]; rows behind the last expert's may hold anything.
      weights: [E, N, D].
      sizes: int32 [E] rows of each expert, in order; their sum is at most M.
    """
    experts = sizes.shape[0]
    expert = expert_of_rows(sizes, x.shape[0])
    values = unpack(weights, x.dtype)
    clean = jnp.where(expert[:, None] < experts, x, 0)

    def add(made: jax.Array, e: jax.Array) -> tuple[jax.Array, None]:
        mine = jnp.where(expert[:, None] == e, clean, 0)
        return made + jnp.matmul(mine, values[e].T, preferred_element_type=jnp.float32), None

    made = jnp.zeros((x.shape[0], values.shape[1]), jnp.float32)
    return jax.lax.scan(add, made, jnp.arange(experts))[0]


def gated(
    x: jax.Array, weights: Weights, sizes: jax.Array, scale: jax.Array, limit: float
) -> jax.Array:
    """[M, I] in x's dtype: scale silu(min(gate, c)) clip(up, -c, c).

    Args:
      weights: [E, 2 I, D], the gates' rows before the ups'. Both products are rounded to x's dtype.
      scale: float32 [M].
      limit: c.
    """
    return activate(grouped_matmul(x, weights, sizes).astype(x.dtype), scale[:, None], limit)


def activate(both: jax.Array, scale: jax.Array, limit: float) -> jax.Array:
    """See `gated`; both [M, 2 I], scale [M, 1]."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    scaled = jnp.where(scale == 0, 0, hidden * scale)
    return scaled.astype(both.dtype)
