"""Models by name: the released sizes, and smaller ones with the same mechanisms.

Engram table rows follow the released rule: per layer, one table per (order, head), each as long as
the next unused prime at or above `vocab_size`; `num_embeddings` is the sum over a layer.
"""

from __future__ import annotations

from deepinfer_jax.config import (
    DraftConfig,
    EngramConfig,
    ModelConfig,
    RopeConfig,
    VisionConfig,
)

TOKENIZERS = {  # of presets that have one: files of `tokenizers`, from the repository's root
    "small": "configs/tokenizers/small.json",
    "trained_tiny": "configs/checkpoints/tiny/tokenizer.json",
}


def v41_flash() -> ModelConfig:
    """DeepSeek-V4.1-Flash, exactly (released config.json and inference/model.py)."""
    return ModelConfig(
        vocab_size=129_280,
        hidden_size=5120,
        num_layers=40,
        num_heads=64,
        head_dim=512,
        rope_head_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_num_heads=32,
        index_head_dim=128,
        index_topk=512,
        num_experts=384,
        num_shared_experts=1,
        num_active_experts=6,
        moe_intermediate_size=2304,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        engram=EngramConfig(
            layer_ids=(1, 14),
            num_embeddings=(384_006_168, 384_016_682),
            max_ngram=4,
            num_heads=8,
            head_dim=256,
            vocab_size=16_000_000,
            pad_token_id=2,
            compressed_vocab_size=99_092,
        ),
        draft=DraftConfig(
            num_layers=3,
            block_size=5,
            noise_token_id=128_799,
            target_layer_ids=(37, 38, 39),
            markov_rank=256,
            num_experts=128,
            num_active_experts=3,
        ),
        vision=VisionConfig(
            num_layers=32,
            hidden_size=1024,
            num_heads=16,
            intermediate_size=2816,
            patch_size=14,
            downsample_ratio=3,
            max_image_tokens=1024,
            min_pixels=295_936,
            image_token_id=129_264,
        ),
    )


def small() -> ModelConfig:
    """About 100 M parameters: twelve layers, window and selection scaled down fourfold."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        num_layers=12,
        num_heads=8,
        head_dim=128,
        rope_head_dim=32,
        q_lora_rank=256,
        o_groups=4,
        o_lora_rank=128,
        window=32,
        compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 6 + (0,) * 3,
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8, 10),
        index_num_heads=32,
        index_head_dim=64,
        index_topk=128,
        num_experts=16,
        num_shared_experts=1,
        num_active_experts=2,
        moe_intermediate_size=256,
        candidate_source_layer_id=6,
        candidate_topk_blocks=64,
        candidate_block_size=8,
        max_positions=65_536,
        rope=RopeConfig(original_max_positions=4096),
        engram=EngramConfig(
            layer_ids=(1, 4),
            num_embeddings=(49_796, 50_980),
            max_ngram=4,
            num_heads=4,
            head_dim=64,
            vocab_size=4096,
            pad_token_id=2,
            compressed_vocab_size=2750,  # what its tokenizer folds to
        ),
        draft=DraftConfig(
            num_layers=3,
            block_size=5,
            noise_token_id=4095,
            target_layer_ids=(9, 10, 11),
            markov_rank=64,
            num_experts=8,
            num_active_experts=1,
        ),
    )


def tiny() -> ModelConfig:
    """For tests: the fewest layers that still share, reindex, truncate, remember and draft.

    32 index heads are not thrift: with few heads relu makes many scores exactly zero, and ties have
    no right answer to compare with.
    """
    return ModelConfig(
        vocab_size=64,
        hidden_size=64,
        num_layers=8,
        num_heads=4,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        window=8,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_num_heads=32,
        index_head_dim=32,
        index_topk=8,
        num_experts=8,
        num_shared_experts=1,
        num_active_experts=2,
        moe_intermediate_size=32,
        candidate_source_layer_id=4,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        max_positions=4096,
        rope=RopeConfig(original_max_positions=256),
        engram=EngramConfig(
            layer_ids=(1, 3),
            num_embeddings=(462, 630),
            max_ngram=4,
            num_heads=2,
            head_dim=32,
            vocab_size=64,
            pad_token_id=2,
            compressed_vocab_size=60,
        ),
        draft=DraftConfig(
            num_layers=2,
            block_size=5,
            noise_token_id=63,
            target_layer_ids=(6, 7),
            markov_rank=16,
            num_experts=4,
            num_active_experts=1,
        ),
    )


def trained_tiny() -> ModelConfig:
    """For text: about 2 M parameters that a laptop trains in minutes, every mechanism at work.

    Six layers: window only, two of ratio 2, three of ratio 1 of which the last selects again among
    candidates. Within 256 tokens each selecting layer leaves most rows out.
    """
    return ModelConfig(
        vocab_size=512,
        hidden_size=96,
        num_layers=6,
        num_heads=4,
        head_dim=32,
        rope_head_dim=16,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=32,
        window=32,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        index_num_heads=8,
        index_head_dim=32,
        index_topk=32,
        num_experts=8,
        num_shared_experts=1,
        num_active_experts=2,
        moe_intermediate_size=64,
        candidate_source_layer_id=3,
        candidate_topk_blocks=16,
        candidate_block_size=4,
        max_positions=4096,
        rope=RopeConfig(original_max_positions=256),
        engram=EngramConfig(
            layer_ids=(1, 2),
            num_embeddings=(6264, 6500),
            max_ngram=4,
            num_heads=2,
            head_dim=32,
            vocab_size=1024,
            pad_token_id=2,
            compressed_vocab_size=512,  # every id its own: the tokenizer is trained with it
        ),
        draft=DraftConfig(
            num_layers=2,
            block_size=5,
            noise_token_id=3,
            target_layer_ids=(4, 5),
            markov_rank=32,
            num_experts=4,
            num_active_experts=2,
        ),
    )
