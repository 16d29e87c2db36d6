"""Expert weights in the three formats that the op takes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats

GROUP = 32  # input channels under one scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """E experts' matrices [out, in]: values, E4M3 codes, or E2M1 codes two to a byte."""

    data: jax.Array  # [E, out, in] values; uint8 [E, out, in] FP8; uint8 [E, out, in / 2] FP4
    scales: jax.Array | None = None  # uint8 [E, out, in / 32], E8M0; None with values

    @property
    def packing(self) -> int:
        """Channels per element of `data`: 1, or 2 for FP4."""
        return 1 if self.scales is None else self.scales.shape[-1] * GROUP // self.data.shape[-1]


def pack(values: jax.Array, name: str) -> Weights:
    """Weights of values [E, out, in] in format "values", "fp8" or "fp4".

    Raises:
      ValueError: an unknown format, or `in` is no multiple of 32.
    """
    if name == "values":
        return Weights(values)
    encoders = {"fp8": formats.encode_e4m3, "fp4": formats.encode_mxfp4}
    if name not in encoders:
        raise ValueError(f"format is {name!r}; choose one of values, fp8, fp4")
    return Weights(*encoders[name](values))


def unpack(weights: Weights, dtype: jnp.dtype) -> jax.Array:
    """Values [E, out, in]."""
    if weights.scales is None:
        return weights.data.astype(dtype)
    decode = formats.decode_mxfp4 if weights.packing == 2 else formats.decode_e4m3
    return decode(weights.data, weights.scales, dtype)
