"""The weights of a V4.1 model: one declaration for every name of the tree.

D hidden, C head, H heads, V vocabulary, n streams, E experts, I expert width, Hi x Di index heads.
Norm weights, biases and mixers start neutral (ones, zeros); matrices random. Everything that the
release keeps in float32 is declared so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import EngramConfig, ModelConfig
from deepinfer_jax.model.parameters import Leaf, Tree
from deepinfer_jax.model.topology import Layer, Mode, topology
from deepinfer_jax.model.vision_parameters import vision_shapes

FLOAT32 = jnp.float32


def model_parameters(config: ModelConfig) -> Tree:
    """The whole tree; parts that the configuration leaves out are absent."""
    width, vocabulary = config.hidden_size, config.vocab_size
    layers = topology(config).layers
    tree = {
        "embed": Leaf((vocabulary, width), ("vocab", "hidden")),
        "layers": tuple(_backbone_layer(config, layer) for layer in layers),
        "norm": _norm(width),
        "head": Leaf((vocabulary, width), ("vocab", "hidden")),
    }
    if config.draft:
        tree["draft"] = _draft(config)
    if config.vision:
        shapes = vision_shapes(config, jnp.dtype(jnp.bfloat16))
        tree["vision"] = jax.tree_util.tree_map_with_path(_vision_leaf, shapes)
    return tree


def _norm(width: int) -> Leaf:
    return Leaf((width,), (None,), "ones")


def _vision_leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Leaf:
    """Replicated; norms start at one, biases and the learned marker vectors at zero."""
    vector = "ones" if "norm" in jax.tree_util.keystr(path) else "zeros"
    return Leaf(shape.shape, (None,) * shape.ndim, "normal" if shape.ndim > 1 else vector)


def _backbone_layer(config: ModelConfig, layer: Layer) -> Tree:
    tree = _block(config, config.num_experts)
    if layer.mode is Mode.FULL:
        tree["compressor"] = _compressor(config, layer.ratio)
    if layer.mode in (Mode.FULL, Mode.REINDEX):
        tree["indexer"] = _indexer(config, owns_keys=layer.mode is Mode.FULL)
    if config.engram and layer.id in config.engram.layer_ids:
        at = config.engram.layer_ids.index(layer.id)
        tree["engram"] = _engram(config, config.engram, config.engram.num_embeddings[at])
    return tree


def _block(config: ModelConfig, num_experts: int) -> Tree:
    """What a backbone layer and a draft stage have in common."""
    return {
        "attn_norm": _norm(config.hidden_size),
        "ffn_norm": _norm(config.hidden_size),
        "attn_mix": _mix(config),
        "ffn_mix": _mix(config),
        "attn": _attention(config),
        "moe": _moe(config, num_experts),
    }


def _mix(config: ModelConfig) -> Tree:
    n = config.hc_mult
    rows = n * (n + 2)
    return {
        "fn": Leaf((rows, n * config.hidden_size), (None, None), dtype=FLOAT32),
        "base": Leaf((rows,), (None,), "zeros", FLOAT32),
        "scale": Leaf((3,), (None,), "ones", FLOAT32),
    }


def _attention(config: ModelConfig) -> Tree:
    width, rank, groups = config.hidden_size, config.q_lora_rank, config.o_groups
    heads = config.num_heads * config.head_dim
    return {
        "wq_a": Leaf((rank, width), ("q_rank", "hidden")),
        "q_norm": _norm(rank),
        "wq_b": Leaf((heads, rank), ("heads", "q_rank")),
        "wkv": Leaf((config.head_dim, width), ("head_dim", "hidden")),
        "kv_norm": _norm(config.head_dim),
        "sink": Leaf((config.num_heads,), ("heads",), "zeros", FLOAT32),
        "wo_a": Leaf((groups, config.o_lora_rank, heads // groups), ("groups", "o_rank", None)),
        "wo_b": Leaf((width, groups * config.o_lora_rank), ("hidden", "o_rank")),
    }


def _compressor(config: ModelConfig, ratio: int) -> Tree:
    projection = Leaf((config.head_dim, config.hidden_size), ("head_dim", "hidden"))
    gate = {"wgate": projection} if ratio > 1 else {}
    return {"wkv": projection, **gate, "norm": _norm(config.head_dim)}


def _indexer(config: ModelConfig, owns_keys: bool) -> Tree:
    heads, width = config.index_num_heads, config.index_head_dim
    tree = {
        "wq_b": Leaf((heads * width, config.q_lora_rank), ("index_heads", "q_rank")),
        "weights": Leaf((heads, config.hidden_size), ("index_heads", "hidden")),
    }
    if owns_keys:
        tree["wk"] = Leaf((width, config.head_dim), (None, "head_dim"))
        tree["k_norm"] = _norm(width)
    return tree


def _moe(config: ModelConfig, experts: int) -> Tree:
    width, inner = config.hidden_size, config.moe_intermediate_size
    shared = inner * config.num_shared_experts
    return {
        "router": Leaf((experts, width), (None, "hidden")),
        "bias": Leaf((experts,), (None,), "zeros", FLOAT32),
        "bias_image": Leaf((experts,), (None,), "zeros", FLOAT32),
        "gate_up": Leaf((experts, 2 * inner, width), ("experts", "expert_width", "hidden")),
        "down": Leaf((experts, width, inner), ("experts", "hidden", "expert_width")),
        "shared_gate_up": Leaf((2 * shared, width), ("shared_width", "hidden")),
        "shared_down": Leaf((width, shared), ("hidden", "shared_width")),
    }


def _engram(config: ModelConfig, engram: EngramConfig, rows: int) -> Tree:
    n, width = config.hc_mult, config.hidden_size
    looked_up = engram.rows_per_token * engram.head_dim
    return {
        "table": Leaf((rows, engram.head_dim), ("engram_rows", None)),
        "wkv": Leaf(((n + 1) * width, looked_up), ("hidden", None)),
        "q_weight": Leaf((n, width), (None, "hidden"), "ones"),
        "k_weight": Leaf((n, width), (None, "hidden"), "ones"),
    }


def _draft(config: ModelConfig) -> Tree:
    draft, width = config.draft, config.hidden_size
    assert draft is not None
    targets = len(draft.target_layer_ids)
    markov = Leaf((config.vocab_size, draft.markov_rank), ("vocab", None))
    return {
        "main_proj": Leaf((width, targets * width), ("hidden", None)),
        "main_norm": _norm(width),
        "layers": tuple(_block(config, draft.num_experts) for _ in range(draft.num_layers)),
        "norm": _norm(width),
        "markov_embed": markov,
        "markov_head": markov,
        "confidence": Leaf((width + draft.markov_rank,), (None,), "zeros"),
    }
