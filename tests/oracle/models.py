"""Small models of every shape the references can run: a strategy, and the tiny preset cut to them.

Widths keep what a fair comparison needs: 32 index heads, so that relu leaves no ties; a candidate
pool that fills the selection even when its newest block holds one row, and at least two active
experts, because beyond these the references part from each other or from the released code; one
shared expert and whole groups of 32 channels, which they require.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig, RopeConfig
from deepinfer_jax.presets import tiny


def plain() -> ModelConfig:
    """The tiny preset without Engram, drafter or images: what mlx-lm can run."""
    return without_extras(tiny())


def remembering() -> ModelConfig:
    """The tiny preset with Engram, as NeMo can run it."""
    return dataclasses.replace(plain(), engram=tiny().engram)


def without_extras(config: ModelConfig) -> ModelConfig:
    """`config` without Engram, drafter and images."""
    ratios = config.compress_ratios[: config.num_layers]
    return dataclasses.replace(config, engram=None, draft=None, vision=None, compress_ratios=ratios)


@st.composite
def topologies(draw: st.DrawFn) -> dict[str, tuple[int, ...] | int | None]:
    """Layers: some windows only, some pairs, then the decoder; each segment with its sources."""
    windows = draw(st.integers(0, 2))
    pairs = draw(st.lists(st.integers(1, 3), max_size=2))  # length of each ratio-2 segment
    singles = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    if windows + sum(pairs) + sum(singles) < 3:
        singles.append(3)
    kv, index, at = [], [], windows
    for length in (*pairs, *singles):
        kv.append(at)
        reindexed = draw(st.sets(st.integers(at + 1, at + length - 1))) if length > 1 else set()
        index += [at, *sorted(reindexed)]
        at += length
    ratios = (0,) * windows + (2,) * sum(pairs) + (1,) * sum(singles)
    source = draw(st.sampled_from([None, kv[-1]]))
    return {
        "num_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": tuple(kv),
        "index_source_layer_ids": tuple(index),
        "candidate_source_layer_id": source,
    }


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any small model without Engram, drafter and images."""
    heads = draw(st.sampled_from([2, 4, 6]))
    topk, block = draw(st.integers(3, 12)), draw(st.sampled_from([2, 4]))
    experts = draw(st.integers(3, 9))
    return ModelConfig(
        vocab_size=64,
        hidden_size=draw(st.sampled_from([48, 64, 80])),
        num_heads=heads,
        head_dim=draw(st.sampled_from([32, 64])),
        rope_head_dim=draw(st.sampled_from([8, 16, 32])),
        q_lora_rank=draw(st.sampled_from([24, 32])),
        o_groups=draw(st.sampled_from([g for g in (1, 2, 3) if heads % g == 0])),
        o_lora_rank=draw(st.sampled_from([8, 16])),
        window=draw(st.integers(3, 12)),
        index_num_heads=draw(st.sampled_from([32, 48])),
        index_head_dim=draw(st.sampled_from([32, 64])),
        index_topk=topk,
        candidate_block_size=block,
        candidate_topk_blocks=1 + -(-(topk - 1) // block) + draw(st.integers(0, 2)),
        num_experts=experts,
        num_shared_experts=1,
        num_active_experts=draw(st.integers(2, min(experts, 4))),
        moe_intermediate_size=draw(st.sampled_from([24, 32])),
        swiglu_limit=draw(st.sampled_from([0.5, 10.0])),
        routed_scaling=draw(st.sampled_from([1.5, 2.5])),
        hc_mult=draw(st.sampled_from([2, 4])),
        hc_sinkhorn_iterations=draw(st.sampled_from([2, 20])),
        max_positions=4096,
        rope=RopeConfig(original_max_positions=draw(st.sampled_from([64, 256]))),
        **draw(topologies()),
    )
