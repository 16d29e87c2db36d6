"""The experts' matmuls by the implementation of one's choice."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.grouped_matmul import reference, tpu
from pallas_kernels.grouped_matmul.weights import Weights


def grouped_matmul(
    x: jax.Array, weights: Weights, sizes: jax.Array, *, kernels: str = "xla"
) -> jax.Array:
    """See `reference.grouped_matmul`.

    Raises:
      ValueError: `kernels` is none of `choice.KERNELS`.
    """
    choice.check("grouped_matmul", kernels)
    if kernels == "xla":
        return reference.grouped_matmul(x, weights, sizes)
    return tpu.grouped_matmul(x, weights, sizes, interpret=choice.interpretation(kernels))


def gated(
    x: jax.Array,
    weights: Weights,
    sizes: jax.Array,
    scale: jax.Array,
    limit: float,
    *,
    kernels: str = "xla",
) -> jax.Array:
    """See `reference.gated`.

    Raises:
      ValueError: `kernels` is none of `choice.KERNELS`.
    """
    choice.check("grouped_matmul", kernels)
    if kernels == "xla":
        return reference.gated(x, weights, sizes, scale, limit)
    mode = choice.interpretation(kernels)
    return tpu.gated(x, weights, sizes, scale, limit, interpret=mode)
