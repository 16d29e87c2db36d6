"""The backbone over whole sequences, in the form that trains fastest: the same maths, all at once.

`model.backbone` gathers a token's selected rows and groups tokens by expert, which is right for
service and slow under a gradient. The parts that differ are the `whole_*` files beside this one.
Tests hold both equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import backbone, engram, streams
from deepinfer_jax.model.compressor import remember
from deepinfer_jax.model.numerics import RELEASED, Numerics, rms_norm
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.model.shares import Shares
from deepinfer_jax.model.topology import Mode, topology
from experiments.training import whole_attention, whole_experts, whole_streams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
    """What whole sequences [S, T] make."""

    logits: jax.Array  # float32 [S, T, V]
    features: tuple[jax.Array, ...]  # [S, T, D] per drafter target
    visits: jax.Array  # int32 [L, E]
    index_loss: jax.Array  # float32, nats, mean over index layers and rows


def forward(
    params: dict[str, Any], config: ModelConfig, tokens: jax.Array, numerics: Numerics = RELEASED
) -> Pass:
    """All layers over tokens int32 [S, T] that start at position 0."""
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    rows = text_rows(config, tokens, start, start + tokens.shape[1])
    alone = Shares(rows, rows)
    memory = whole_attention.Global(jnp.zeros((1, 1, config.head_dim)))
    state, pre = streams.start(backbone.embed(params, rows), config)
    selected, features, visits, divergences = None, [], [], []
    for layer, weights in zip(topology(config).layers, params["layers"], strict=True):
        if "engram" in weights and config.engram:
            looked_up = rows.engram[config.engram.layer_ids.index(layer.id)]
            state = engram.apply(weights["engram"], config, state, looked_up, rows.is_image)
        x = rms_norm(whole_streams.collapse(state, pre), weights["attn_norm"], config.norm_eps)
        if layer.mode is Mode.FULL:
            memory = remember(weights, config, layer, x, alone, memory, numerics)  # type: ignore[type-var]
        if config.draft and layer.id in config.draft.target_layer_ids:
            features.append(streams.mean(state))
        mixed = whole_streams.mix(weights["attn_mix"], config, state)
        y, selected, divergence = whole_attention.layer_attention(
            weights, config, layer, x, rows, memory, selected, numerics
        )
        divergences += [] if divergence is None else [divergence]
        state, pre = whole_streams.expand(state, mixed, y), mixed.pre
        mixed = whole_streams.mix(weights["ffn_mix"], config, state)
        x = rms_norm(whole_streams.collapse(state, pre), weights["ffn_norm"], config.norm_eps)
        y, visited = whole_experts.every_expert(
            weights["moe"], config, x, config.num_active_experts
        )
        state, pre = whole_streams.expand(state, mixed, y), mixed.pre
        visits.append(visited)
    logits = backbone.logits(params, config, whole_streams.collapse(state, pre))
    index_loss = jnp.mean(jnp.stack(divergences)) if divergences else jnp.float32(0)
    return Pass(logits, tuple(features), jnp.stack(visits), index_loss)
