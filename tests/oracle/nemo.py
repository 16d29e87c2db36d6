"""NVIDIA's NeMo AutoModel 0.7.0 as a reference: full sequences, no cache, PyTorch in float32.

Of the two references it is the one with Engram. Its drafter is not run here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention
from nemo_automodel.components.models.deepseek_v41.config import (
    DeepseekV41Config,
    DeepseekV41TextConfig,
    DeepseekV41VisionConfig,
)
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from deepinfer_jax.config import EngramConfig, ModelConfig

Array = npt.NDArray[Any]

BACKEND = {
    "attn": "eager",
    "linear": "torch",
    "rms_norm": "torch_fp32",
    "experts": "torch_mm",
    "dispatcher": "torch",
}


def tokenizer(engram: EngramConfig, vocab_size: int) -> PreTrainedTokenizerFast:
    """Words `t0`, `t1`, ..., of which the last few are capitals: compressed id = id, then from 0.

    `vocab_size - compressed_vocab_size` ids at the end are read as the first ids in lower case.
    """
    distinct = engram.compressed_vocab_size
    words = [f"t{i}" if i < distinct else f"T{i - distinct}" for i in range(vocab_size)]
    vocabulary = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), unk_token="t0"
    )


def text_config(config: ModelConfig) -> DeepseekV41TextConfig:
    """The same model in NeMo's terms."""
    engram, rope = config.engram, config.rope
    source = config.candidate_source_layer_id
    fields: dict[str, Any] = {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.num_active_experts,
        "num_hidden_layers": config.num_layers,
        "index_n_heads": config.index_num_heads,
        "qk_rope_head_dim": config.rope_head_dim,
        "rms_norm_eps": config.norm_eps,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iterations,
        "routed_scaling_factor": config.routed_scaling,
        "sliding_window": config.window,
        "max_position_embeddings": config.max_positions,
        "candidate_source_layer_id": -1 if source is None else source,
        "rope_theta": rope.theta,
        "compress_rope_theta": rope.compress_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": rope.yarn_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_max_position_embeddings": rope.original_max_positions,
        },
        "engram_layer_ids": [],
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 0,
        "dspark_noise_token_id": 0,
        "dtype": "float32",
    }
    same = (
        "vocab_size hidden_size head_dim q_lora_rank o_groups o_lora_rank moe_intermediate_size "
        "index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_eps "
        "swiglu_limit compress_ratios kv_source_layer_ids index_source_layer_ids"
    )
    for name in same.split():
        value = getattr(config, name)
        fields[name] = list(value) if isinstance(value, tuple) else value
    if engram:
        fields |= {
            "engram_layer_ids": list(engram.layer_ids),
            "engram_num_embeddings": list(engram.num_embeddings),
            "engram_max_ngram_size": engram.max_ngram,
            "engram_vocab_size": engram.vocab_size,
            "engram_n_heads": engram.num_heads,
            "engram_head_dim": engram.head_dim,
            "engram_pad_token_id": engram.pad_token_id,
            "engram_compressed_vocab_size": engram.compressed_vocab_size,
        }
    return DeepseekV41TextConfig(**fields)


def _block(layer: dict[str, Any]) -> dict[str, Array]:
    """The names below one block: attention, experts and stream mixing."""
    attn, moe = layer["attn"], layer["moe"]
    named = {f"attn.{k}.weight": attn[k] for k in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm")}
    named |= {
        "attn.wo_a.weight": attn["wo_a"].reshape(-1, attn["wo_a"].shape[-1]),
        "attn.wo_b.weight": attn["wo_b"],
        "attn.sinks_param.weight": attn["sink"],
        "attn_norm.weight": layer["attn_norm"],
        "ffn_norm.weight": layer["ffn_norm"],
        "ffn.gate.weight": moe["router"],
        "ffn.gate.e_score_correction_bias": moe["bias"],
        "ffn.gate.bias_vl": moe["bias_image"],
        "ffn.experts.gate_and_up_projs": moe["gate_up"].transpose(0, 2, 1),
        "ffn.experts.down_projs": moe["down"].transpose(0, 2, 1),
        "ffn.shared_experts.down_proj.weight": moe["shared_down"],
    }
    gate, up = np.split(moe["shared_gate_up"], 2)
    named |= {"ffn.shared_experts.gate_proj.weight": gate, "ffn.shared_experts.up_proj.weight": up}
    for name in ("attn", "ffn"):
        named |= {f"{name}_hc.{k}": v for k, v in layer[f"{name}_mix"].items()}
    return named


def _sources(layer: dict[str, Any]) -> dict[str, Array]:
    """The names of what only some backbone layers have: compressor, indexer, Engram."""
    named = {f"attn.compressor.{k}.weight": v for k, v in layer.get("compressor", {}).items()}
    for key, value in layer.get("indexer", {}).items():
        name = "weights_proj" if key == "weights" else key
        named[f"attn.indexer.{name}.weight"] = value
    if engram := layer.get("engram"):
        named |= {"engram.embed.weight": engram["table"], "engram.wkv.weight": engram["wkv"]}
        named |= {f"engram.{k}": engram[k] for k in ("q_weight", "k_weight")}
    return named


def _load(module: torch.nn.Module, named: dict[str, Array]) -> None:
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in named.items()}
    module.load_state_dict(tensors, strict=True)


def backbone(config: ModelConfig, params: dict[str, Any]) -> DeepseekV41ForCausalLM:
    """NeMo's model with our weights."""
    both = DeepseekV41Config(
        vision_config=DeepseekV41VisionConfig(num_hidden_layers=0),
        text_config=text_config(config),
    )
    words = tokenizer(config.engram, config.vocab_size) if config.engram else None
    model = DeepseekV41ForCausalLM(both, backend=BackendConfig(**BACKEND), tokenizer=words)
    model.initialize_weights(torch.device("cpu"), dtype=torch.float32)
    named = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["norm"],
        "lm_head.weight": params["head"],
    }
    for i, layer in enumerate(params["layers"]):
        parts = _block(layer) | _sources(layer)
        named |= {f"model.layers.{i}.{name}": value for name, value in parts.items()}
    _load(model, named)
    return model.eval()


@contextlib.contextmanager
def rounding(enabled: bool) -> Iterator[None]:
    """Switch the rounding of window rows, global rows, index keys and index queries."""
    saved = attention.quantize_cache
    if not enabled:
        attention.quantize_cache = lambda values, **_: values
    try:
        yield
    finally:
        attention.quantize_cache = saved


@torch.no_grad()
def logits(model: DeepseekV41ForCausalLM, ids: Array) -> Array:
    """Logits [T, V] of `ids` [T]."""
    return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
