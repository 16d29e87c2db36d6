"""What one rank must multiply and move in a step: operations and HBM bytes, part by part.

Attention is data parallel and experts are expert parallel over the same ranks; every other weight
is replicated (the released engine has no tensor parallelism, its vocabulary matrices included).
Bytes are the least a step can move: a weight once per step, a cached row once per request (its
queries sharing one selection), and of activations only prefill's residual streams, which do not fit
on the chip. Not counted: sampling, image encoding, and the drafter's ring rows of a prompt (0.6 %
of its linear work). Formats are the released
model's: FP8 weights with a scale byte per 32 x 32 block, FP4 experts with one per 32, BF16
vocabulary, router, compressor and Markov matrices, FP32 stream mixers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepinfer_jax.config import CacheConfig, DraftConfig, ModelConfig
from deepinfer_jax.cost import operations as ops
from deepinfer_jax.cost import parameters as count
from deepinfer_jax.cost.exchange import WireFormat, exchanged_bytes
from deepinfer_jax.layout import index_row_bytes, main_row_bytes, ring_row_bytes

FP8_WEIGHT_BYTES = 1 + 1 / 1024
FP4_WEIGHT_BYTES = 1 / 2 + 1 / 32
V41_WIRE = WireFormat(scale_group=32, scale_bytes=1)
"""Rows dispatched in E4M3 with one E8M0 byte per 32 channels, combined in BF16."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One part of a step on one rank.

    `operations` are FP8-equivalent (see operations.py) and run in the matmul format `format`, one
    of `operations.FP4, FP8, BF16, FP32`; `bytes` cross the HBM once.
    """

    name: str
    format: int
    operations: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A whole step of one rank: its parts and the bytes it sends in all expert exchanges."""

    parts: tuple[Work, ...]
    dispatch_bytes: float
    combine_bytes: float


def touched_experts(experts: float, active: int, total: int, tokens: float) -> float:
    """Expected number of `experts` hit by `tokens`, each choosing `active` of `total` evenly.

    `experts * (1 - (1 - active / total)**tokens)`.
    """
    return experts * (1 - (1 - active / total) ** tokens)


def _routed(
    model: ModelConfig, experts: int, active: int, ranks: int, group_tokens: float
) -> float:
    """Bytes of the routed experts one rank reads in one layer."""
    local = touched_experts(experts / ranks, active, experts, group_tokens)
    return local * count.expert_parameters(model) * FP4_WEIGHT_BYTES


def _row_layers(model: ModelConfig, counted: ops.Operations) -> int:
    """Rows computed, summed over the layers (truncation computes fewer in the decoder)."""
    per_row = ops.BF16 * model.hidden_size * model.num_experts
    return int(np.sum(counted.router)) // per_row


def _rows_read(
    model: ModelConfig, contexts: np.ndarray, queries: np.ndarray
) -> tuple[float, float]:
    """(attention, index) bytes read by all layers for requests of these contexts and new rows."""
    ring = np.minimum(contexts, model.window + queries - 1).sum() * ring_row_bytes(model)
    attention, index = float(ring * model.num_layers), 0.0
    pool = model.candidate_topk_blocks * model.candidate_block_size
    for layer in range(model.num_layers):
        if not (ratio := model.compress_ratios[layer]):
            continue
        rows = contexts // ratio
        chosen = np.minimum(rows, model.index_topk)  # at least one selection, at best shared
        attention += float(chosen.sum() * main_row_bytes(model))
        if layer in model.index_source_layer_ids:
            pooled = layer in model.candidate_user_layer_ids
            scored = np.minimum(rows, pool) if pooled else rows
            index += float(scored.sum() * index_row_bytes(model))
    return attention, index


def _parts(
    model: ModelConfig,
    counted: ops.Operations,
    requests: int,
    tokens: int,
    ranks: int,
    attention_bytes: float,
    index_bytes: float,
    stream_bytes: float,
) -> list[Work]:
    layers, width = model.num_layers, model.hidden_size
    total = {
        field.name: float(np.broadcast_to(getattr(counted, field.name), requests).sum())
        for field in dataclasses.fields(counted)
    }
    routed = model.num_active_experts / (model.num_active_experts + model.num_shared_experts)
    expert_bytes = _routed(
        model, model.num_experts, model.num_active_experts, ranks, ranks * tokens
    )
    shared = model.num_shared_experts * count.expert_parameters(model) * FP8_WEIGHT_BYTES
    linear = layers * count.attention_parameters(model) + count.indexer_parameters(model)
    mixers = layers * count.hyper_connection_parameters(model) * 4
    parts = [
        Work("attention core", ops.BF16, total["core"], attention_bytes),
        Work("index scoring", ops.FP4, total["selection"], index_bytes),
        Work("attention linear", ops.FP8, total["projections"], linear * FP8_WEIGHT_BYTES),
        Work("compressor", ops.BF16, total["compression"], 2 * count.compressor_parameters(model)),
        Work("routed experts", ops.FP8, total["experts"] * routed, layers * expert_bytes),
        Work("shared expert", ops.FP8, total["experts"] * (1 - routed), layers * shared),
        Work("router", ops.BF16, total["router"], 2 * layers * model.num_experts * width),
        Work("streams", ops.FP32, total["streams"], mixers + stream_bytes),
        Work("head", ops.BF16, total["logits"], 2 * model.vocab_size * width),
    ]
    if model.engram:
        looked_up = model.engram.rows_per_token * model.engram.head_dim
        sites = len(model.engram.layer_ids)
        weights = sites * looked_up * (model.hc_mult + 1) * width * FP8_WEIGHT_BYTES
        rows = tokens * sites * looked_up * (1 + 1 / 32)
        parts.append(Work("engram", ops.FP8, total["engram"], weights + rows))
    return parts


def _draft(
    model: ModelConfig, draft: DraftConfig, requests: int, nextn: int, ranks: int
) -> list[Work]:
    """DSpark: its context rows from every verified row, then one block of `nextn` queries."""
    width, rows = model.hidden_size, requests * nextn
    inputs = len(draft.target_layer_ids) * width * width
    layer = count.attention_parameters(model)
    expert = count.expert_parameters(model)
    dense = layer + model.num_shared_experts * expert
    stages = draft.num_layers
    per_row = stages * (dense + draft.num_active_experts * expert)
    context = inputs + stages * width * model.head_dim
    routed = _routed(model, draft.num_experts, draft.num_active_experts, ranks, ranks * rows)
    router = draft.num_experts * width
    vocabulary = model.vocab_size * (width + draft.markov_rank)
    keys = model.window + nextn
    attended = 2 * model.num_heads * model.head_dim * keys
    ring = requests * stages * keys * ring_row_bytes(model)
    mixers = stages * count.hyper_connection_parameters(model)
    linear = ops.FP8 * (per_row * rows + context * requests * (nextn + 1))
    weights = stages * (dense * FP8_WEIGHT_BYTES + routed + 2 * router) + inputs * FP8_WEIGHT_BYTES
    return [
        Work("draft layers", ops.FP8, linear, weights + 4 * mixers),
        Work("draft core", ops.BF16, ops.BF16 * stages * attended * rows, ring),
        Work("draft head", ops.BF16, ops.BF16 * vocabulary * rows, 2 * vocabulary),
    ]


def _exchange(copies_rows: float, active: int, model: ModelConfig) -> tuple[float, float]:
    dispatch, combine = exchanged_bytes(1, active, model.hidden_size, V41_WIRE)
    return copies_rows * dispatch, copies_rows * combine


def prefill_work(
    model: ModelConfig,
    chunks: Sequence[tuple[int, int]],
    ranks: int,
    cache: CacheConfig | None = None,
) -> StepWork:
    """One prompt step of a rank whose neighbours do as much.

    Args:
      chunks: (q new tokens, c cached tokens) of each request in the step.
      ranks: EP = DP size.
      cache: truncation of the decoder layers (None: off).
    """
    q = np.asarray([chunk[0] for chunk in chunks], np.int64)
    k = q + np.asarray([chunk[1] for chunk in chunks], np.int64)
    counted = ops.prompt_operations(model, q, k, cache)
    row_layers = _row_layers(model, counted)
    streams = 8 * row_layers * model.hc_mult * model.hidden_size  # two sublayers, in and out, BF16
    attention, index = _rows_read(model, k, q)
    parts = _parts(model, counted, len(q), int(q.sum()), ranks, attention, index, streams)
    sent = _exchange(row_layers, model.num_active_experts, model)
    return StepWork(tuple(parts), *sent)


def decode_work(
    model: ModelConfig, requests: int, kv_tokens: int, nextn: int, ranks: int
) -> StepWork:
    """One decode step of a rank: every request verifies `nextn` drafts and proposes `nextn` more.

    Args:
      requests: running on the rank. kv_tokens: they hold together, the verified rows included; all
        are taken to be as long as their mean, never shorter than the verified rows.
      nextn: drafts per request; 0 leaves the drafter out.
      ranks: EP = DP size.
    """
    if requests < 1 or kv_tokens < 0 or nextn < 0 or ranks < 1:
        raise ValueError(
            f"requests={requests}, kv_tokens={kv_tokens}, nextn={nextn}, ranks={ranks}: "
            "a decode step has a request and a rank, and nothing negative"
        )
    rows = nextn + 1
    k = np.full(requests, max(kv_tokens // requests, rows), np.int64)
    counted = ops.decode_operations(model, np.full(requests, rows, np.int64), k)
    attention, index = _rows_read(model, k, np.full(requests, rows, np.int64))
    parts = _parts(model, counted, requests, requests * rows, ranks, attention, index, 0.0)
    dispatch, combine = _exchange(
        requests * rows * model.num_layers, model.num_active_experts, model
    )
    if model.draft and nextn:
        parts += _draft(model, model.draft, requests, nextn, ranks)
        more = _exchange(
            requests * nextn * model.draft.num_layers, model.draft.num_active_experts, model
        )
        dispatch, combine = dispatch + more[0], combine + more[1]
    return StepWork(tuple(parts), dispatch, combine)
