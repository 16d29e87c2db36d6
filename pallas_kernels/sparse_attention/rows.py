"""How sparse attention wants global rows to lie: each alone in words of 32 bits, C / 4 of them.

TPUs copy whole tiles, and a row of its own must be a tile of its own: 128 words, 512 bytes, of
which an FP4 row of 512 channels fills 288. Word l holds data byte l in its lowest byte, data byte
C / 4 + l in the next, and scale l, if there is one, in the third.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def spread_rows(packed: jax.Array) -> jax.Array:
    """uint32 [..., 1, C / 4] of rows uint8 [..., C / 2 + C / 16] of `formats.pack_row_fp4_e4m3`."""
    words = packed.shape[-1] * 4 // 9
    near, far, scales = jnp.split(packed.astype(jnp.uint32), [words, 2 * words], axis=-1)
    empty = [(0, 0)] * (scales.ndim - 1) + [(0, words - scales.shape[-1])]
    return (near | far << 8 | jnp.pad(scales, empty) << 16)[..., None, :]


def gather_rows(words: jax.Array) -> jax.Array:
    """Rows uint8 [..., C / 2 + C / 16] of `spread_rows`."""
    words = words[..., 0, :]
    parts = [(words >> shift & 255).astype(jnp.uint8) for shift in (0, 8, 16)]
    return jnp.concatenate([*parts[:2], parts[2][..., : words.shape[-1] // 4]], axis=-1)


def channel_order(width: int) -> jax.Array:
    """int32 [C]: the channels in the order in which words give them up.

    First the low halves of the lowest bytes, then their high halves, then those of the next bytes.
    """
    half = jnp.arange(width).reshape(2, width // 4, 2)
    return half.swapaxes(1, 2).reshape(-1)
