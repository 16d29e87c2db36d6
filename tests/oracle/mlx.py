"""Apple's mlx-lm 0.32.2 as a reference: chunks, decode and verify steps on a cache, in float32.

It has no Engram, no drafter and no images. A layer's cache only ever replaces its arrays, so a copy
of the cache objects is a snapshot to roll back to.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models import deepseek_v41 as reference

from deepinfer_jax.config import ModelConfig

Array = npt.NDArray[Any]
Cache = list[reference.LayerCache]


def model_args(config: ModelConfig) -> reference.ModelArgs:
    """The same model, without Engram, in mlx-lm's terms."""
    source, rope = config.candidate_source_layer_id, config.rope
    same = (
        "vocab_size hidden_size head_dim q_lora_rank o_groups o_lora_rank moe_intermediate_size "
        "index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_eps "
        "swiglu_limit compress_ratios kv_source_layer_ids index_source_layer_ids"
    )
    return reference.ModelArgs(
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        qk_rope_head_dim=config.rope_head_dim,
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.num_active_experts,
        routed_scaling_factor=config.routed_scaling,
        rms_norm_eps=config.norm_eps,
        sliding_window=config.window,
        index_n_heads=config.index_num_heads,
        hc_sinkhorn_iters=config.hc_sinkhorn_iterations,
        candidate_source_layer_id=-1 if source is None else source,
        max_position_embeddings=config.max_positions,
        rope_theta=rope.theta,
        compress_rope_theta=rope.compress_theta,
        rope_scaling={
            "factor": rope.yarn_factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        },
        **{name: getattr(config, name) for name in same.split()},
    )


ATTENTION = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_norm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv": "kv_proj.weight",
    "kv_norm": "kv_norm.weight",
    "sink": "sinks",
    "wo_a": "o_a_proj.weight",
    "wo_b": "o_b_proj.weight",
}
COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "norm": "kv_norm"}
INDEXER = {"wq_b": "q_b_proj", "weights": "weights_proj", "wk": "k_proj", "k_norm": "k_norm"}


def _layer(layer: dict[str, Any]) -> dict[str, Array]:
    moe = layer["moe"]
    gate, up = np.split(moe["gate_up"], 2, axis=1)
    shared_gate, shared_up = np.split(moe["shared_gate_up"], 2)
    named = {f"self_attn.{ATTENTION[k]}": v for k, v in layer["attn"].items()}
    named |= {
        "input_layernorm.weight": layer["attn_norm"],
        "post_attention_layernorm.weight": layer["ffn_norm"],
        "mlp.gate.weight": moe["router"],
        "mlp.gate.e_score_correction_bias": moe["bias"],
        "mlp.experts.switch_mlp.gate_proj.weight": gate,
        "mlp.experts.switch_mlp.up_proj.weight": up,
        "mlp.experts.switch_mlp.down_proj.weight": moe["down"],
        "mlp.shared_experts.gate_proj.weight": shared_gate,
        "mlp.shared_experts.up_proj.weight": shared_up,
        "mlp.shared_experts.down_proj.weight": moe["shared_down"],
    }
    for key, value in layer.get("compressor", {}).items():
        named[f"self_attn.compressor.{COMPRESSOR[key]}.weight"] = value
    for key, value in layer.get("indexer", {}).items():
        named[f"self_attn.indexer.{INDEXER[key]}.weight"] = value
    for name in ("attn", "ffn"):
        named |= {f"{name}_hc.{k}": v for k, v in layer[f"{name}_mix"].items()}
    return named


def backbone(config: ModelConfig, params: dict[str, Any]) -> reference.Model:
    """mlx-lm's model with our weights."""
    model = reference.Model(model_args(config))
    named = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["norm"],
        "lm_head.weight": params["head"],
    }
    for i, layer in enumerate(params["layers"]):
        named |= {f"model.layers.{i}.{name}": value for name, value in _layer(layer).items()}
    arrays = [(name, mx.array(np.ascontiguousarray(value))) for name, value in named.items()]
    model.load_weights(arrays, strict=True)
    return model


@contextlib.contextmanager
def rounding(enabled: bool) -> Iterator[None]:
    """Switch the rounding of window rows, global rows, index keys and index queries."""
    saved = reference._fake_quant_fp8, reference._fake_quant_fp4
    if not enabled:
        reference._fake_quant_fp8 = reference._fake_quant_fp4 = lambda x, *_, **__: x
    try:
        yield
    finally:
        reference._fake_quant_fp8, reference._fake_quant_fp4 = saved


def extend(model: reference.Model, cache: Cache, ids: Array) -> Array:
    """Logits [T, V] of the next `ids` [T]; the cache moves on by T positions."""
    return np.array(model(mx.array(ids.astype(np.int32))[None], cache))[0]


@contextlib.contextmanager
def truncated(config: ModelConfig, start: int) -> Iterator[None]:
    """In the decoder, hide window rows before position `start` from the rows behind it.

    mlx-lm has no such mode; this changes the window indices its layers are called with.
    """
    original = reference.DecoderLayer.__call__

    def hiding(layer: Any, *args: Any, start_pos: int, window_idx: mx.array, **rest: Any) -> Any:
        if layer.layer_idx >= config.boundary_layer:
            held = min(start_pos, config.window)
            rows = start_pos + mx.arange(window_idx.shape[1])[None, :, None]
            hidden = (rows >= start) & (window_idx + start_pos - held < start)
            window_idx = mx.where(hidden, -1, window_idx)
        return original(layer, *args, start_pos=start_pos, window_idx=window_idx, **rest)

    reference.DecoderLayer.__call__ = hiding
    try:
        yield
    finally:
        reference.DecoderLayer.__call__ = original


def snapshot(cache: Cache) -> Cache:
    """The cache as it stands, unaffected by what is appended to `cache` later."""
    return [copy.copy(layer) for layer in cache]


def in_chunks(model: reference.Model, ids: Array, lengths: list[int]) -> Array:
    """Logits [T, V] of `ids` [T] taken as chunks of `lengths`; the last takes the rest."""
    cache, at, parts = model.make_cache(), 0, []
    for length in [*lengths, len(ids)]:
        chunk = ids[at : at + length]
        if len(chunk):
            parts.append(extend(model, cache, chunk))
        at += length
    return np.concatenate(parts)
