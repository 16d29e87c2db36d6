"""FP8 and FP4 codes to values inside TPU kernels, by the compiler's own conversion from E4M3.

TPU 7x converts E4M3 in hardware; on others the compiler's sequence is still shorter than arithmetic
on int32. An E2M1 code, sign and three bits, moved to the right places of an E4M3 byte is its value
over 64, small values included; that takes a few operations on four bytes at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

E2M1_UNIT = 64  # `e2m1` makes values over this


def e4m3(codes: jax.Array, dtype: Any) -> jax.Array:
    """Values of uint8 codes [R, C]."""
    return pltpu.bitcast(codes, jnp.float8_e4m3fn).astype(dtype)


def e2m1(codes: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values over `E2M1_UNIT` of the low and of the high half bytes of uint8 [R, C], 4 | R."""
    words = pltpu.bitcast(codes, jnp.uint32)
    low = (_each(0x80) & (words << 4)) | (_each(0x1C) & (words << 2))
    high = (_each(0x80) & words) | (_each(0x1C) & (words >> 2))
    return e4m3(pltpu.bitcast(low, jnp.uint8), dtype), e4m3(pltpu.bitcast(high, jnp.uint8), dtype)


def _each(byte: int) -> jax.Array:
    return jnp.uint32(byte * 0x01010101)


def spread(scales: jax.Array, width: int, group: int) -> jax.Array:
    """float32 [R, width]: each scale of [R, width / group] under its channels.

    By a product with zeros and ones, exact for values that bfloat16 holds.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (scales.shape[1], width), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (scales.shape[1], width), 1)
    ones = jnp.where(lane // group == row, 1.0, 0.0).astype(jnp.bfloat16)
    return jnp.dot(scales.astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
