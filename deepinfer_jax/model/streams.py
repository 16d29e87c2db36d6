"""Single-pass hyper-connections: n residual streams, mixed before and after every sublayer.

A sublayer's mixer reads all streams once and gives three things: `post` and `comb`, with which this
sublayer's output enters the streams, and `pre`, with which the NEXT sublayer collapses them into
its input. So a sublayer is: collapse with the pending `pre`, norm, compute, expand.
Source: released DeepSeek-V4.1 `inference/model.py`; hyper-connections, arXiv 2409.19606; the
doubly stochastic `comb`, arXiv 2512.24880. Mixing is float32; the streams keep their dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mix:
    """What one mixer says; n streams. All float32."""

    pre: jax.Array  # [..., n] weights of the next sublayer's collapse
    post: jax.Array  # [..., n] weights of this sublayer's output in each stream
    comb: jax.Array  # [..., n in, n out] columns and rows sum to one


def start(embedded: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Streams [..., n, D] and first `pre` [..., n] of embedded tokens [..., D]: copies; the first."""
    n = config.hc_mult
    streams = jnp.broadcast_to(
        embedded[..., None, :], (*embedded.shape[:-1], n, embedded.shape[-1])
    )
    return streams, jnp.broadcast_to(jax.nn.one_hot(0, n), (*embedded.shape[:-1], n))


def mix(params: dict[str, Any], config: ModelConfig, streams: jax.Array) -> Mix:
    """Mixing weights of streams [..., n, D]; params: fn [n (n + 2), n D], base, scale [3]."""
    n = config.hc_mult
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + config.norm_eps)
    raw = linear(flat, params["fn"]) * inverse_rms
    scale = jnp.repeat(params["scale"], jnp.array([n, n, n * n]), total_repeat_length=n * (n + 2))
    pre, post, comb = jnp.split(raw * scale + params["base"], [n, 2 * n], axis=-1)
    comb = comb.reshape(*comb.shape[:-1], n, n)
    return Mix(
        pre=jax.nn.sigmoid(pre) + config.hc_eps,
        post=2 * jax.nn.sigmoid(post),
        comb=_sinkhorn(comb, config.hc_sinkhorn_iterations, config.hc_eps),
    )


def _sinkhorn(comb: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Nearly doubly stochastic [..., n, n]: a row softmax, then columns and rows in turn."""
    n = comb.shape[-1]

    def row_sums(comb: jax.Array) -> jax.Array:
        return _added([comb[..., j : j + 1] for j in range(n)])

    def by_columns(comb: jax.Array) -> jax.Array:
        return comb / (_added([comb[..., j : j + 1, :] for j in range(n)]) + eps)

    def both(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        return by_columns(comb / (row_sums(comb) + eps)), None

    top = functools.reduce(jnp.maximum, [comb[..., j : j + 1] for j in range(n)])
    comb = jnp.exp(comb - top)
    comb = by_columns(comb / row_sums(comb) + eps)
    return jax.lax.scan(both, comb, None, length=iterations - 1)[0]


def _added(terms: Sequence[jax.Array]) -> jax.Array:
    """Their sum, written out: XLA:CPU's reduction over an axis of four is many times slower."""
    return functools.reduce(operator.add, terms)


def collapse(streams: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_j weights_j streams_j: [..., n, D] and [..., n] to [..., D]."""
    n = streams.shape[-2]
    terms = [weights[..., j, None] * streams[..., j, :].astype(jnp.float32) for j in range(n)]
    return _added(terms).astype(streams.dtype)


def expand(streams: jax.Array, mixed: Mix, output: jax.Array) -> jax.Array:
    """Streams [..., n, D] after a sublayer whose output is [..., D]: post y + comb^T streams."""
    old = streams.astype(jnp.float32)
    n = streams.shape[-2]
    carried = _added([mixed.comb[..., j, :, None] * old[..., j, None, :] for j in range(n)])
    new = mixed.post[..., None] * output.astype(jnp.float32)[..., None, :] + carried
    return new.astype(streams.dtype)


def mean(streams: jax.Array) -> jax.Array:
    """Plain mean over the streams, summed in float32: [..., n, D] to [..., D]."""
    n = streams.shape[-2]
    return collapse(streams, jnp.full((*streams.shape[:-2], n), 1 / n))
