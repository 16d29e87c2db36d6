"""The released `config.json` and `ModelConfig`: one table of names, and the values that must hold.

Source: DeepSeek-V4.1-Flash's config.json and what the released DeepInfer 0.1.0 requires of it.
The image encoder's depth, heads and inner width are constants there; they are read where present.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint.shards import read_json
from deepinfer_jax.config import (
    DraftConfig,
    EngramConfig,
    ModelConfig,
    RopeConfig,
    VisionConfig,
)

_NAMES = {  # ours -> theirs, in text_config
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "compress_ratios": "compress_ratios",
    "kv_source_layer_ids": "kv_source_layer_ids",
    "index_source_layer_ids": "index_source_layer_ids",
    "index_num_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_active_experts": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "candidate_source_layer_id": "candidate_source_layer_id",
    "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size",
    "routed_scaling": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iterations": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
_YARN = {
    "yarn_factor": "factor",
    "original_max_positions": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ENGRAM = {
    "layer_ids": "engram_layer_ids",
    "num_embeddings": "engram_num_embeddings",
    "max_ngram": "engram_max_ngram_size",
    "num_heads": "engram_n_heads",
    "head_dim": "engram_head_dim",
    "vocab_size": "engram_vocab_size",
    "pad_token_id": "engram_pad_token_id",
    "compressed_vocab_size": "engram_compressed_vocab_size",
}
_DRAFT = {
    "num_layers": "num_nextn_predict_layers",
    "block_size": "dspark_block_size",
    "noise_token_id": "dspark_noise_token_id",
    "target_layer_ids": "dspark_target_layer_ids",
    "markov_rank": "dspark_markov_rank",
    "num_experts": "dspark_n_routed_experts",
    "num_active_experts": "dspark_num_experts_per_tok",
}
_VISION = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "patch_size": "patch_size",
    "downsample_ratio": "downsample_ratio",
    "max_image_tokens": "max_image_tokens",
    "min_pixels": "min_pixels",
}
_VISION_CONSTANTS = {"num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 2816}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOP = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "expert_dtype": "fp4",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
    },
}
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0,
    "num_key_value_heads": 1,
}
_IF_PRESENT = {  # what this model is; a file may leave these out
    "hc_shifted": True,
    "dspark_target_attn_input": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


def released_config(path: str | Path) -> ModelConfig:
    """The model of a released `config.json`, given as that file or as its directory.

    Raises:
      ValueError: a field is absent or of another kind, a required value differs, or the sizes break
        a rule of `ModelConfig`.
    """
    path = Path(path)
    data = read_json(path / "config.json" if path.is_dir() else path)
    text = _get(data, "text_config", "")
    for found, wanted, where in ((data, _TOP, ""), (text, _REQUIRED, "text_config.")):
        for name, value in wanted.items():
            _require(_get(found, name, where), value, where + name)
    for name, value in _IF_PRESENT.items():
        _require(text.get(name, value), value, f"text_config.{name}")
    sources = _get(text, "kv_source_layer_ids", "text_config.")
    keys = text.get("index_k_source_layer_ids", sources)
    _require(keys, sources, "text_config.index_k_source_layer_ids")
    try:
        return ModelConfig(
            **_taken(text, _NAMES, "text_config."),
            **{name: _get(data, name, "") for name in _TOKENS},
            use_fp4_sparse_kv=text.get("use_fp4_sparse_kv", True),
            rope=_rope(text),
            engram=EngramConfig(**_taken(text, _ENGRAM)) if text.get("engram_layer_ids") else None,
            draft=DraftConfig(**_taken(text, _DRAFT)) if text.get(_DRAFT["num_layers"]) else None,
            vision=_vision(data),
        )
    except TypeError as error:
        raise ValueError(f"config.json holds a value of the wrong kind: {error}") from None


def _get(data: Any, name: str, where: str) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise ValueError(f"config.json has no {where}{name}, which the model needs; add it")
    return data[name]


def _taken(data: Any, table: dict[str, str], where: str = "text_config.") -> dict[str, Any]:
    values = {ours: _get(data, theirs, where) for ours, theirs in table.items()}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _require(found: Any, wanted: Any, name: str) -> None:
    """`wanted` at `name`; of an object, its own fields only."""
    if isinstance(wanted, dict):
        for part, value in wanted.items():
            _require(_get(found, part, f"{name}."), value, f"{name}.{part}")
    elif found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise ValueError(
            f"config.json has {name} = {found!r}; only {wanted!r} is supported, so use a checkpoint "
            "of that form"
        )


def _rope(text: dict[str, Any]) -> RopeConfig:
    """YaRN by a factor of 1 changes nothing: that is how its absence is held."""
    thetas = _taken(text, {"theta": "rope_theta", "compress_theta": "compress_rope_theta"})
    scaling = text.get("rope_scaling")
    if scaling is None:
        return RopeConfig(**thetas, yarn_factor=1.0)
    kind = scaling.get("type", scaling.get("rope_type"))
    _require(kind, "yarn", "text_config.rope_scaling.type")
    return RopeConfig(**thetas, **_taken(scaling, _YARN, "text_config.rope_scaling."))


def _vision(data: dict[str, Any]) -> VisionConfig | None:
    part = data.get("vision_config")
    if part is None:
        return None
    _require(part.get("max_wh_ratio"), None, "vision_config.max_wh_ratio")
    values = _taken({**_VISION_CONSTANTS, **part}, _VISION, "vision_config.")
    return VisionConfig(**values, image_token_id=_get(data, "image_token_id", ""))


def write_released_config(config: ModelConfig, directory: str | Path) -> None:
    """Write `config.json` into a directory; `released_config` reads the same model back."""

    def put(part: object, table: dict[str, str]) -> dict[str, Any]:
        return {theirs: getattr(part, ours) for ours, theirs in table.items()} if part else {}

    rope = config.rope
    text = {
        **put(config, _NAMES),
        **_REQUIRED,
        **_IF_PRESENT,
        "use_fp4_sparse_kv": config.use_fp4_sparse_kv,
        "rope_theta": rope.theta,
        "compress_rope_theta": rope.compress_theta,
        "rope_scaling": {"type": "yarn", **put(rope, _YARN)},
        **put(config.engram, _ENGRAM),
        **put(config.draft, _DRAFT),
    }
    data = {**_TOP, **{name: getattr(config, name) for name in _TOKENS}, "text_config": text}
    if config.vision:
        data["vision_config"] = put(config.vision, _VISION)
        data["image_token_id"] = config.vision.image_token_id
    (Path(directory) / "config.json").write_text(json.dumps(data, indent=2) + "\n")
