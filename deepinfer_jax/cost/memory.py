"""What a rank's HBM holds: weights, states of running requests, and KV blocks in the rest."""

from __future__ import annotations

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.cost.hardware import GIB, Hardware
from deepinfer_jax.cost.parameters import (
    expert_parameters,
    hyper_connection_parameters,
    parameter_counts,
)
from deepinfer_jax.cost.work import FP4_WEIGHT_BYTES, FP8_WEIGHT_BYTES
from deepinfer_jax.layout import block_layout, state_layout, state_slots

BF16_BYTES, FP32_BYTES = 2, 4
ENGRAM_BYTES = 1 + 1 / 32
"""Table rows in E4M3 with one scale byte per 32 channels, as `cost.work` reads them."""


def weight_bytes_per_rank(model: ModelConfig, ranks: int) -> float:
    """Bytes of weights on one rank with EP = DP = `ranks`.

    Routed experts and Engram tables are split over the ranks, everything else is replicated (the
    released engine has no tensor parallelism). Formats are those of `cost.work`: FP4 experts, FP8
    matrices, BF16 vocabulary, router, compressor and vision, FP32 stream mixers; V4.1 with 8
    ranks: 73.8 GB, of which 37.0 are experts and 25.3 Engram tables.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: an engine has at least one rank; give 1 or more")
    n = parameter_counts(model)
    expert, layers = expert_parameters(model), model.num_layers
    routed = layers * model.num_experts * expert
    drafter = 0 if model.draft is None else model.draft.num_layers * model.draft.num_experts
    router = layers * model.num_experts * model.hidden_size
    mixers = layers * hyper_connection_parameters(model)
    split = FP4_WEIGHT_BYTES * (routed + drafter * expert) + ENGRAM_BYTES * n["engram_tables"]
    wide = n["embedding"] + n["head"] + n["compressor"] + n["vision"] + router
    narrow = n["attention"] + n["moe"] - routed - router + n["indexer"] + n["engram_projections"]
    narrow += n["draft"] - drafter * expert
    replicated = BF16_BYTES * wide + FP8_WEIGHT_BYTES * narrow + FP32_BYTES * mixers
    return split / ranks + replicated


def kv_blocks_per_rank(
    model: ModelConfig,
    hardware: Hardware,
    ranks: int,
    slots: int,
    *,
    cache: CacheConfig | None = None,
    hbm_share: float = 0.9,
    reserved_gib: float = 4.0,
) -> int:
    """KV blocks that fit beside the weights and the states of `slots` running requests.

    Args:
      hbm_share: share of the HBM the engine may use.
      reserved_gib: for activations, buffers and compiled programs.

    Raises:
      ValueError: the weights and states leave no room for one block.
    """
    cache = cache or CacheConfig()
    usable = hardware.hbm_bytes * hbm_share - reserved_gib * GIB
    weights = weight_bytes_per_rank(model, ranks)
    states = state_slots(slots) * state_layout(model, cache).live.size
    left = usable - weights - states
    blocks = int(left // block_layout(model, cache).size)
    if blocks < 1:
        raise ValueError(
            f"{hardware.name} with {ranks} ranks: {usable / 1e9:.1f} GB usable, but weights take "
            f"{weights / 1e9:.1f} and {slots} request states {states / 1e9:.1f}; use more ranks, "
            "fewer slots or larger devices"
        )
    return blocks
