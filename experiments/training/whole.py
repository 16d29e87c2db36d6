"""The backbone over whole sequences, in the form that trains fastest: the same maths, all at once.

`model.backbone` gathers a token's selected rows and groups tokens by expert, which is right for
service and slow under a gradient. Here attention reads its window in bands and all global rows
under a mask, every expert computes every token, weighted (by zero, mostly), and the residual
streams are mixed with tokens along the last axis, where a vector unit finds them. Tests hold both
equal.

Selecting is not differentiable, so the indexer learns from a loss of its own: the divergence of its
scores from the attention's weights on the visible global rows, averaged over heads, as in the
DeepSeek-V3.2 report's sparse attention. The target is that of the selecting layer itself, although
later layers use the selection too. Index queries see detached inputs; through the keys a little of
this loss reaches the latents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, backbone, engram, experts, indexer, streams
from deepinfer_jax.model.compressor import remember
from deepinfer_jax.model.numerics import (
    RELEASED,
    Angles,
    Numerics,
    frequencies,
    linear,
    rms_norm,
    rotate,
)
from deepinfer_jax.model.rows import Rows, text_rows
from deepinfer_jax.model.topology import Layer, Mode, topology

FLOOR = attention.FLOOR


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
    """What whole sequences [S, T] make."""

    logits: jax.Array  # float32 [S, T, V]
    features: tuple[jax.Array, ...]  # [S, T, D] per drafter target
    visits: jax.Array  # int32 [L, E]
    index_loss: jax.Array  # float32, nats, mean over index layers and rows


@dataclasses.dataclass(frozen=True)
class _Global:
    """The latest global rows: the part of a `Memory` that `remember` uses, from position 0 on."""

    rows: jax.Array | None = None  # [S, G, C]
    keys: jax.Array | None = None  # [S, G, Di]

    def read_raw(self, layer: int, start: jax.Array) -> jax.Array:
        """[S, 1, 2, C], of which nothing is used: the first group begins with the first row."""
        assert self.rows is not None
        return jnp.zeros((start.shape[0], 1, 2, self.rows.shape[-1]), jnp.float32)

    def write_raw(
        self, layer: int, positions: jax.Array, raw: jax.Array, keep: jax.Array
    ) -> _Global:
        """Nothing: no later step will complete a group."""
        return self

    def write_global(
        self, source: int, first: jax.Array, rows: jax.Array, keys: jax.Array, keep: jax.Array
    ) -> _Global:
        """All groups of the sequences; that of an unfinished one is never visible."""
        return _Global(rows, keys)


@dataclasses.dataclass(frozen=True)
class _Selected:
    """Of one index segment: rows attended to and rows that later layers may select."""

    shown: jax.Array  # bool [S, T, G]
    pool: jax.Array | None  # bool [S, T, G]


def forward(
    params: dict[str, Any], config: ModelConfig, tokens: jax.Array, numerics: Numerics = RELEASED
) -> Pass:
    """All layers over tokens int32 [S, T] that start at position 0."""
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    rows = text_rows(config, tokens, start, start + tokens.shape[1])
    memory = _Global(jnp.zeros((1, 1, config.head_dim)))
    state, pre = streams.start(backbone.embed(params, rows), config)
    selected, features, visits, divergences = None, [], [], []
    for layer, weights in zip(topology(config).layers, params["layers"], strict=True):
        if "engram" in weights and config.engram:
            looked_up = rows.engram[config.engram.layer_ids.index(layer.id)]
            state = engram.apply(weights["engram"], config, state, looked_up, rows.is_image)
        x = rms_norm(streams.collapse(state, pre), weights["attn_norm"], config.norm_eps)
        if layer.mode is Mode.FULL:
            memory = remember(weights, config, layer, x, rows, memory, numerics)  # type: ignore[type-var]
        if config.draft and layer.id in config.draft.target_layer_ids:
            features.append(streams.mean(state))
        mixed = mix(weights["attn_mix"], config, state)
        y, selected, divergence = _attention(
            weights, config, layer, x, rows, memory, selected, numerics
        )
        divergences += [] if divergence is None else [divergence]
        state, pre = streams.expand(state, mixed, y), mixed.pre
        mixed = mix(weights["ffn_mix"], config, state)
        x = rms_norm(streams.collapse(state, pre), weights["ffn_norm"], config.norm_eps)
        y, visited = every_expert(weights["moe"], config, x, config.num_active_experts)
        state, pre = streams.expand(state, mixed, y), mixed.pre
        visits.append(visited)
    logits = backbone.logits(params, config, streams.collapse(state, pre))
    index_loss = jnp.mean(jnp.stack(divergences)) if divergences else jnp.float32(0)
    return Pass(logits, tuple(features), jnp.stack(visits), index_loss)


def mix(params: dict[str, Any], config: ModelConfig, state: jax.Array) -> streams.Mix:
    """`streams.mix` of state [S, T, n, D], its Sinkhorn steps over [n, n, S, T]."""
    n = config.hc_mult
    flat = state.reshape(*state.shape[:2], -1)
    scale = jax.lax.rsqrt(jnp.mean(flat**2, axis=-1) + config.norm_eps)
    raw = jnp.einsum("sti,oi->ost", flat, params["fn"]) * scale
    gain = jnp.repeat(params["scale"], jnp.array([n, n, n * n]), total_repeat_length=n * (n + 2))
    raw = raw * gain[:, None, None] + params["base"][:, None, None]
    pre, post, comb = jnp.split(raw, [n, 2 * n])
    comb = _sinkhorn(comb.reshape(n, n, *raw.shape[1:]), config)
    return streams.Mix(
        pre=jnp.moveaxis(jax.nn.sigmoid(pre) + config.hc_eps, 0, -1),
        post=jnp.moveaxis(2 * jax.nn.sigmoid(post), 0, -1),
        comb=jnp.moveaxis(comb, (0, 1), (-2, -1)),
    )


def _sinkhorn(comb: jax.Array, config: ModelConfig) -> jax.Array:
    """Nearly doubly stochastic [n in, n out, S, T]."""
    eps = config.hc_eps
    comb = jnp.exp(comb - jax.lax.stop_gradient(comb.max(1, keepdims=True)))
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)

    def both(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        return comb / (comb.sum(0, keepdims=True) + eps), None

    return jax.lax.scan(both, comb, None, length=config.hc_sinkhorn_iterations - 1)[0]


def _attention(
    weights: dict[str, Any],
    config: ModelConfig,
    layer: Layer,
    x: jax.Array,
    rows: Rows,
    memory: _Global,
    selected: _Selected | None,
    numerics: Numerics,
) -> tuple[jax.Array, _Selected | None, jax.Array | None]:
    """The layer's output [S, T, D], the selection after it, and the indexer's loss if it has one."""
    params = weights["attn"]
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=layer.ratio > 0)
    angles = Angles.at(rows.positions, freqs)
    latent = attention.compressed_query(params, config, x)
    query = attention.queries(params, config, latent, angles) * config.head_dim**-0.5
    window = attention.window_rows(params, config, x, angles, numerics)
    divergence, far = None, None
    if layer.kv_source is not None:
        assert memory.rows is not None and memory.keys is not None
        scores = jnp.einsum("sqhc,skc->sqhk", query, memory.rows)
        if layer.mode in (Mode.FULL, Mode.REINDEX):
            at = (rows.positions, angles, memory.keys)
            index = _index_scores(weights["indexer"], config, x, latent, at, numerics)
            selected = _select(config, layer, index, rows.positions, selected)
            divergence = _divergence(scores, index, rows.positions, layer.ratio)
        assert selected is not None
        far = (jnp.where(selected.shown[:, :, None], scores, FLOOR), memory.rows)
    mixed = _attend(query, window, config.window, far, params["sink"])
    return attention.project_out(params, config, mixed, angles), selected, divergence


def _attend(
    query: jax.Array,
    rows: jax.Array,
    width: int,
    far: tuple[jax.Array, jax.Array] | None,
    sink: jax.Array,
) -> jax.Array:
    """Attention [S, T, H, C] over the last `width` of rows [S, T, C] and what `far` scores.

    Tokens are cut into bands of `width`: a band sees itself and the band before.

    Args:
      query: scaled, [S, T, H, C].
      far: masked scores [S, T, H, G] of global rows [S, G, C].
      sink: [H].
    """
    count, length = query.shape[:2]
    bands = -(-length // width)
    padding = ((0, 0), (0, bands * width - length), (0, 0))
    own = jnp.pad(rows, padding).reshape(count, bands, width, -1)
    before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    near = jnp.concatenate([before, own], axis=2)
    banded = jnp.pad(query, (*padding, (0, 0))).reshape(count, bands, width, *query.shape[2:])
    scores = jnp.einsum("snqhc,snkc->snqhk", banded, near)
    row, key = jnp.arange(width)[:, None], jnp.arange(2 * width)
    shown = (key > row) & (key <= row + width)
    first = (jnp.arange(bands) == 0)[:, None, None] & (key < width)
    scores = jnp.where((shown & ~first)[:, :, None], scores, FLOOR)
    scores = scores.reshape(count, -1, *scores.shape[3:])[:, :length]
    top = jnp.maximum(scores.max(-1), sink)
    if far is not None:
        top = jnp.maximum(top, far[0].max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    weight = jnp.exp(scores - top)
    total = weight.sum(-1, keepdims=True) + jnp.exp(sink[:, None] - top)
    weight = jnp.pad(weight, (*padding, (0, 0))).reshape(count, bands, width, *weight.shape[2:])
    mixed = jnp.einsum("snqhk,snkc->snqhc", weight, near)
    mixed = mixed.reshape(count, -1, *mixed.shape[3:])[:, :length]
    if far is not None:
        weight = jnp.exp(far[0] - top)
        total = total + weight.sum(-1, keepdims=True)
        mixed = mixed + jnp.einsum("sqhk,skc->sqhc", weight, far[1])
    return mixed / total


def _index_scores(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    latent: jax.Array,
    at: tuple[jax.Array, Angles, jax.Array],
    numerics: Numerics,
) -> jax.Array:
    """float32 [S, T, G]; gradients reach the indexer's weights and the keys."""
    x, latent = jax.lax.stop_gradient((x, latent))
    positions, angles, keys = at
    heads, width = config.index_num_heads, config.index_head_dim
    query = linear(latent, params["wq_b"]).reshape(*positions.shape, heads, width)
    query = numerics.index_row(rotate(query, angles.heads()))
    weight = linear(x, params["weights"]).astype(jnp.float32) * (width**-0.5 * heads**-0.5)
    dots = jax.nn.relu(jnp.einsum("sqhd,sgd->sqhg", query, keys))
    return (dots * weight[..., None]).sum(2)


def _visible(positions: jax.Array, ratio: int, groups: int) -> jax.Array:
    return jnp.arange(groups) < ((positions + 1) // ratio)[..., None]


def _select(
    config: ModelConfig,
    layer: Layer,
    scores: jax.Array,
    positions: jax.Array,
    previous: _Selected | None,
) -> _Selected:
    """The top-k of the visible rows, or of the candidates among them."""
    scores = jax.lax.stop_gradient(scores)
    groups = scores.shape[-1]
    shown = _visible(positions, layer.ratio, groups)
    if groups <= config.index_topk:
        return _Selected(shown, None)
    pool = previous.pool if previous and layer.uses_candidates else None
    if pool is not None:
        shown &= pool
    if layer.offers_candidates:
        pool = indexer.candidate_rows(config, scores, (positions + 1) // layer.ratio)
    best, index = jax.lax.top_k(jnp.where(shown, scores, indexer.HIDDEN), config.index_topk)
    chosen = jnp.put_along_axis(
        jnp.zeros(scores.shape, bool), index, best > indexer.HIDDEN, axis=-1, inplace=False
    )
    return _Selected(chosen, pool)


def _divergence(
    attended: jax.Array, scores: jax.Array, positions: jax.Array, ratio: int
) -> jax.Array:
    """Mean over rows of KL(attention's weights over visible rows | softmax of index scores).

    Args:
      attended: the attention's scores [S, T, H, G]; no gradient passes.
      scores: the indexer's [S, T, G].
    """
    shown = _visible(positions, ratio, scores.shape[-1])
    attended = jnp.where(shown[:, :, None], jax.lax.stop_gradient(attended), FLOOR)
    target = jnp.where(shown, jax.nn.softmax(attended, axis=-1).mean(2), 0)
    guess = jax.nn.log_softmax(jnp.where(shown, scores, FLOOR), axis=-1)
    terms = jnp.where(target > 0, target * (jnp.log(jnp.where(target > 0, target, 1)) - guess), 0)
    return terms.sum(-1).mean()


def every_expert(
    params: dict[str, Any], config: ModelConfig, x: jax.Array, active: int
) -> tuple[jax.Array, jax.Array]:
    """`experts.moe` for text: output [S, T, D] and visits int32 [E]; each expert sees all tokens."""
    flat = x.reshape(-1, x.shape[-1])
    count, double, width = params["gate_up"].shape
    is_image = jnp.zeros(flat.shape[0], bool)
    chosen, weight = experts.route(params, config, flat, is_image, active)
    picked = jax.nn.one_hot(chosen, count, dtype=jnp.float32)
    scale = jnp.einsum("tke,tk->te", picked, weight)
    hidden = linear(flat, params["gate_up"].reshape(-1, width)).reshape(-1, count, double)
    hidden = _gated(hidden, config) * scale[..., None]
    down = params["down"].transpose(1, 0, 2).reshape(width, -1)
    routed = linear(hidden.reshape(flat.shape[0], -1), down)
    shared = linear(_gated(linear(flat, params["shared_gate_up"]), config), params["shared_down"])
    return (routed + shared).reshape(x.shape), picked.sum((0, 1)).astype(jnp.int32)


def _gated(gate_up: jax.Array, config: ModelConfig) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    limit = config.swiglu_limit
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
