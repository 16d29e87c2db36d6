"""What a rank must hold and multiply, from `layout` and `cost` alone: no tree, no compiler."""

from __future__ import annotations

from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.cost import operations as ops
from deepinfer_jax.cost import parameters as count
from deepinfer_jax.layout import block_layout, state_layout

BF16, FP32 = 2, 4


def weight_bytes(model: ModelConfig, devices: int, extra: int = 0) -> float:
    """Bytes of weights on one of `devices` that divide experts and tables, BF16.

    The released model's FP32 weights (stream mixers, router biases, sinks) stay FP32; experts fill
    slots, with `extra` copies at least.
    """
    n, draft = count.parameter_counts(model), model.draft
    layers = [(model.num_layers, model.num_experts)]
    layers += [(draft.num_layers, draft.num_experts)] if draft else []
    local = routed = wide = 0
    for number, experts in layers:
        local += number * -(-(experts + extra) // devices) * count.expert_parameters(model)
        routed += number * experts * count.expert_parameters(model)
        wide += number * (count.hyper_connection_parameters(model) + 2 * experts + model.num_heads)
    replicated = n["total"] - n["vision"] - routed - n["engram_tables"]
    return BF16 * (local + n["engram_tables"] / devices + replicated) + (FP32 - BF16) * wide


def cache_bytes(model: ModelConfig, config: EngineConfig) -> float:
    """Bytes of a rank's memory in format "bytes": blocks, slots, proposals, penalties."""
    seats, cache, vocabulary = config.max_num_seqs + 1, config.cache, model.vocab_size
    blocks = config.num_blocks * block_layout(model, cache).payload
    slots = config.num_slots * state_layout(model, cache).live.payload
    proposals = seats * cache.nextn * vocabulary * FP32
    history = config.num_slots * vocabulary * FP32
    hidden = seats * config.step_rows * model.hidden_size * BF16
    return blocks + slots + proposals + history + hidden


def matmul_flops(model: ModelConfig, name: str, config: EngineConfig, prompt: int) -> float:
    """Two per multiply-add of a rank's step by `cost.operations`, all requests at full length.

    "decode" verifies every seat's drafts; "prompt" is the last chunk of `prompt` tokens; neither
    has logits, which "sample" makes.
    """
    if name == "decode":
        rows, seats = config.step_rows, config.max_num_seqs
        made = ops.decode_operations(model, rows, config.max_model_len)
    else:
        rows, seats = prompt, 1
        made = ops.prompt_operations(model, rows, config.max_model_len)
    fp8 = made.projections + made.experts + made.engram
    bf16 = made.compression + made.core + made.router
    macs = fp8 / ops.FP8 + bf16 / ops.BF16 + made.selection / ops.FP4 + made.streams / ops.FP32
    return 2.0 * seats * macs
