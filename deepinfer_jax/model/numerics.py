"""Arithmetic that every part of the model shares: norms, linears, rotary angles, cache rounding.

Sources: released DeepSeek-V4.1 `inference/model.py`; YaRN, arXiv 2309.00071 (frequencies only: no
factor on the cosines, none on the softmax). Statistics, angles and sums are float32 whatever the
dtype of the rows; a result is rounded once, at the end.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig, RopeConfig
from pallas_kernels import formats


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Which rows are rounded to their cache format before anything reads them.

    The released model rounds all of them, in the forward pass and not only in storage. Turned off,
    rows keep the dtype of the parameters: for studies, and to tell rounding from a mistake.
    """

    window: bool = True  # FP8, E8M0 scale per 32 channels
    main: bool = True  # FP4 with E4M3 scales per 16, or FP8 if the model says so
    index: bool = True  # FP4, E8M0 scale per 32: index keys and index queries

    def window_row(self, x: jax.Array) -> jax.Array:
        """Sliding-window rows [..., C] as the cache will give them back."""
        return formats.fake_e4m3(x) if self.window else x

    def main_row(self, x: jax.Array, config: ModelConfig) -> jax.Array:
        """Global rows [..., C] as the cache will give them back."""
        if not self.main:
            return x
        return formats.fake_fp4_e4m3(x) if config.use_fp4_sparse_kv else formats.fake_e4m3(x)

    def index_row(self, x: jax.Array) -> jax.Array:
        """Index keys or queries [..., Di] as the scorer sees them."""
        return formats.fake_mxfp4(x) if self.index else x


RELEASED = Numerics()
EXACT = Numerics(window=False, main=False, index=False)


def linear(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], summed in float32; in x.dtype unless `dtype` is given."""
    flat = x.reshape(-1, x.shape[-1])  # XLA:CPU multiplies two axes faster than three
    y = jax.lax.dot_general(
        flat, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y.astype(dtype or x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in float32, rounded once to x.dtype."""
    hidden = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + eps)
    return (hidden * scale * weight.astype(jnp.float32)).astype(x.dtype)


def frequencies(rope: RopeConfig, width: int, compressed: bool) -> np.ndarray:
    """Rotary frequencies float32 [width / 2], in radians per position.

    Ratio-0 layers turn by plain powers of `theta`. Every layer with a global memory (`compressed`)
    turns, its window rows too, by YaRN's blend: slow pairs are slowed by the factor, fast ones not.
    """
    pairs = np.arange(0, width, 2, dtype=np.float64) / width
    if not compressed:
        return (rope.theta**-pairs).astype(np.float32)
    plain = rope.compress_theta**-pairs
    low = max(math.floor(_turning_pair(rope, width, rope.beta_fast)), 0)
    high = min(math.ceil(_turning_pair(rope, width, rope.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (plain / rope.yarn_factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _turning_pair(rope: RopeConfig, width: int, turns: float) -> float:
    """The (real-valued) pair that makes `turns` turns within the original context."""
    length = rope.original_max_positions / (2 * math.pi * turns)
    return width * math.log(length) / (2 * math.log(rope.compress_theta))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Angles:
    """Cosines and sines of positions, float32 [..., R / 2]."""

    cos: jax.Array
    sin: jax.Array

    @classmethod
    def at(cls, positions: jax.Array, freqs: np.ndarray) -> Angles:
        """Angles of positions [...] under frequencies [R / 2]."""
        phase = positions.astype(jnp.float32)[..., None] * jnp.asarray(freqs)
        return cls(jnp.cos(phase), jnp.sin(phase))

    @property
    def inverse(self) -> Angles:
        """The angles that undo these."""
        return Angles(self.cos, -self.sin)

    def heads(self) -> Angles:
        """The same angles for every head: a one in front of the last axis."""
        return Angles(self.cos[..., None, :], self.sin[..., None, :])


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Turn adjacent pairs of the last R channels of x [..., C] in float32; the others stay."""
    still = x.shape[-1] - 2 * angles.cos.shape[-1]
    even = x[..., still::2].astype(jnp.float32)
    odd = x[..., still + 1 :: 2].astype(jnp.float32)
    real = even * angles.cos - odd * angles.sin
    imaginary = even * angles.sin + odd * angles.cos
    turned = jnp.stack([real, imaginary], axis=-1).astype(x.dtype)
    turned = turned.reshape(*x.shape[:-1], x.shape[-1] - still)
    return jnp.concatenate([x[..., :still], turned], axis=-1)
