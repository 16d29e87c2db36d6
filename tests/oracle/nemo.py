"""NVIDIA's NeMo AutoModel 0.7.0 as a reference: full sequences, no cache, PyTorch in float32.

Of the two references it is the one with Engram, images and a drafter. The drafter is its training
model: attention over the target's features, of which the mask of one anchor shows what a ring would
hold. Its confidence head was trained behind the last norm; the released one reads the hidden state
before it, so `drafted` hands it that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention, dspark
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
    engram, rope, draft = config.engram, config.rope, config.draft
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
    if draft:
        fields |= {
            "num_nextn_predict_layers": draft.num_layers,
            "dspark_block_size": draft.block_size,
            "dspark_noise_token_id": draft.noise_token_id,
            "dspark_target_layer_ids": list(draft.target_layer_ids),
            "dspark_markov_rank": draft.markov_rank,
            "dspark_n_routed_experts": draft.num_experts,
            "dspark_num_experts_per_tok": draft.num_active_experts,
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
        attention.quantize_cache = dspark.quantize_cache = lambda values, **_: values
    try:
        yield
    finally:
        attention.quantize_cache = dspark.quantize_cache = saved


@torch.no_grad()
def logits(model: DeepseekV41ForCausalLM, ids: Array) -> Array:
    """Logits [T, V] of `ids` [T]."""
    return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


@torch.no_grad()
def illustrated(
    model: DeepseekV41ForCausalLM, ids: Array, is_image: Array, embeddings: Array
) -> Array:
    """Logits [T, V] of a prompt whose rows `is_image` [T] have their `embeddings` [T, D]."""
    tokens, where = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(is_image)
    text = model.model.embed_tokens(tokens)
    rows = torch.where(where[:, None], torch.from_numpy(embeddings), text)
    hidden, _ = model.model(tokens[None], image_mask=where[None], inputs_embeds=rows[None])
    return model.lm_head(hidden)[0].numpy()


def drafter(config: ModelConfig, params: dict[str, Any]) -> dspark.DeepseekV41DSparkModel:
    """NeMo's draft model with our weights."""
    made = dspark.DeepseekV41DSparkModel(
        text_config(config),
        BackendConfig(**BACKEND),
        num_anchors=1,
        enable_confidence_head=True,
    ).float()
    draft = params["draft"]
    named = {"embed_tokens.weight": params["embed"], "lm_head.weight": params["head"]}
    for i, stage in enumerate(draft["layers"]):
        named |= {f"mtp.{i}.{name}": value for name, value in _block(stage).items()}
    last = f"mtp.{len(draft['layers']) - 1}"
    named |= {
        "mtp.0.main_proj.weight": draft["main_proj"],
        "mtp.0.main_norm.weight": draft["main_norm"],
        f"{last}.norm.weight": draft["norm"],
        f"{last}.markov_head.embed.weight": draft["markov_embed"],
        f"{last}.markov_head.head.weight": draft["markov_head"],
        f"{last}.confidence_head.proj.weight": draft["confidence"][None],
    }
    _load(made, named)
    return made.eval()


@torch.no_grad()
def drafted(
    config: ModelConfig,
    model: DeepseekV41ForCausalLM,
    made: dspark.DeepseekV41DSparkModel,
    ids: Array,
) -> tuple[int, Array, Array]:
    """The token after `ids` [T], and the tokens [N] and confidences [N] drafted behind it, greedily."""
    assert config.draft is not None
    targets, features = list(config.draft.target_layer_ids), []
    for module in model.get_dspark_target_feature_modules(targets):
        module.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].mean(2)))
    raw: list[torch.Tensor] = []
    last = made.mtp[-1]
    last.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0][0]))
    token = first = torch.from_numpy(logits(model, ids)[-1]).argmax()
    block = torch.full((1, config.draft.block_size), config.draft.noise_token_id)
    block[0, 0] = first
    anchor = torch.tensor([[len(ids)]])
    shown = made.build_attention_mask(anchor, anchor > 0, len(ids), torch.float32)
    out = dspark.DeepseekV41DSparkBackbone.forward(
        made,
        made.embed_tokens(block),
        torch.cat(features, -1),
        position_ids=made.build_position_ids(anchor, len(ids)),
        attention_mask=shown,
    )
    base = made.compute_logits(out.normalized_hidden_states)[0]
    tokens, confidence = [], []
    for hidden, row in zip(raw[0], base, strict=True):
        bias, seen = last.markov_head(token)
        confidence.append(last.confidence_head(hidden, seen).sigmoid().item())
        token = (row + bias).argmax()
        tokens.append(int(token))
    return int(first), np.array(tokens), np.array(confidence, np.float32)
