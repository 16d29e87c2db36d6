"""Stored bytes to numbers and back, for the kinds of `names.Kind`, on the host.

Decoding looks values up: a byte has 256 meanings, a product with a power of two is exact in
float32. The meanings are those of `pallas_kernels.formats`, which also encodes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.names import GROUP, Kind, Part
from pallas_kernels import formats

_ONE = 127  # the E8M0 byte of 1.0


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32: E4M3 [256], E2M1 pairs [256, 2] (low half byte first), E8M0 [256]."""
    byte, one = jnp.arange(256, dtype=jnp.uint8)[:, None], jnp.full((256, 1), _ONE, jnp.uint8)
    scales = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - _ONE).astype(np.float32)
    scales[255] = np.nan
    e4m3, e2m1 = formats.decode_e4m3(byte, one), formats.decode_mxfp4(byte, one)
    return np.asarray(e4m3)[:, 0], np.asarray(e2m1), scales


def decode(kind: Kind, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of rows [n, in or in / 2] and their scale rows -> float32 [n, in].

    With square scales, the first row must be the first of a square.
    """
    e4m3, e2m1, e8m0 = _tables()
    rows = len(values)
    x = e2m1[values].reshape(rows, -1) if kind is Kind.FP4_ROWS else e4m3[values]
    factor = e8m0[scales]
    if kind is Kind.FP8_SQUARES:
        factor = np.repeat(factor, GROUP, axis=0)[:rows]
    width = x.shape[1]
    if width % GROUP == 0:
        grouped = x.reshape(rows, -1, GROUP)
        grouped *= factor[:, :, None]
        return grouped.reshape(rows, width)
    return x * np.repeat(factor, GROUP, axis=1)[:, :width]


_ENCODERS = {
    Kind.FP8_SQUARES: jax.jit(formats.encode_fp8_blocks),
    Kind.FP8_ROWS: jax.jit(formats.encode_e4m3),
    Kind.FP4_ROWS: jax.jit(formats.encode_mxfp4),
}


def encode(part: Part, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Arrays of `part.tensors` for the numbers x [part.shape].

    Raises:
      ValueError: x holds a NaN or an infinity, which no group survives; or a width that no whole
        number of scales covers.
    """
    if not np.isfinite(x.astype(np.float32)).all():
        raise ValueError(f"{part.name} holds a NaN or an infinity; only finite weights are stored")
    if part.kind in _ENCODERS:
        codes, scales = _ENCODERS[part.kind](x.astype(np.float32))
        return np.asarray(codes), np.asarray(scales)
    dtype = np.float32 if part.kind is Kind.F32 else ml_dtypes.bfloat16
    return (x.astype(dtype),)
