"""How many parameters a model has, part by part, counted from its configuration alone."""

from __future__ import annotations

from deepinfer_jax.config import EngramConfig, ModelConfig


def attention_parameters(model: ModelConfig) -> int:
    """Projections of one attention layer: query (two factors), window KV, output (two factors)."""
    heads_width = model.num_heads * model.head_dim
    output_rank = model.o_groups * model.o_lora_rank
    query = model.q_lora_rank * (model.hidden_size + heads_width)
    output = heads_width * model.o_lora_rank + output_rank * model.hidden_size
    return query + model.hidden_size * model.head_dim + output


def expert_parameters(model: ModelConfig) -> int:
    """Gate, up and down projections of one expert, routed or shared."""
    return 3 * model.hidden_size * model.moe_intermediate_size


def moe_parameters(model: ModelConfig, num_experts: int) -> int:
    """One MoE layer: its experts, the shared ones, and the router."""
    experts = num_experts + model.num_shared_experts
    return experts * expert_parameters(model) + num_experts * model.hidden_size


def hyper_connection_parameters(model: ModelConfig) -> int:
    """Both stream mixers of one layer: `fn`, base and scale (attention and MoE)."""
    mixes = model.hc_mult * (model.hc_mult + 2)
    return 2 * (mixes * model.hc_mult * model.hidden_size + mixes + 3)


def indexer_parameters(model: ModelConfig) -> int:
    """Index queries and head weights of the index sources, index keys of the KV sources."""
    query = model.q_lora_rank * model.index_num_heads * model.index_head_dim
    weights = model.hidden_size * model.index_num_heads
    key = (model.head_dim + 1) * model.index_head_dim
    sources = len(model.index_source_layer_ids)
    return sources * (query + weights) + len(model.kv_source_layer_ids) * key


def compressor_parameters(model: ModelConfig) -> int:
    """KV projection of every source, a gate where it pools, and the norm."""
    projection = model.hidden_size * model.head_dim
    gates = len(model.compression_layer_ids)
    sources = len(model.kv_source_layer_ids)
    return (sources + gates) * projection + sources * model.head_dim


def _norms_and_sinks(model: ModelConfig) -> int:
    return 2 * model.hidden_size + model.q_lora_rank + model.head_dim + model.num_heads


def _engram_projection(model: ModelConfig, engram: EngramConfig) -> int:
    keys_and_value = (model.hc_mult + 1) * model.hidden_size
    gates = 2 * model.hc_mult * model.hidden_size
    return engram.rows_per_token * engram.head_dim * keys_and_value + gates


def _draft_parameters(model: ModelConfig) -> int:
    draft, width = model.draft, model.hidden_size
    if draft is None:
        return 0
    layer = attention_parameters(model) + moe_parameters(model, draft.num_experts)
    layer += hyper_connection_parameters(model) + _norms_and_sinks(model) + 2 * draft.num_experts
    inputs = len(draft.target_layer_ids) * width * width + width
    markov = 2 * model.vocab_size * draft.markov_rank
    return draft.num_layers * layer + inputs + markov + width + (width + draft.markov_rank)


def _vision_parameters(model: ModelConfig) -> int:
    vision, out = model.vision, model.hidden_size
    if vision is None:
        return 0
    width = vision.hidden_size
    attention = 4 * width * width + 4 * width
    layer = attention + 3 * width * vision.intermediate_size + 2 * width
    patches = (3 * vision.patch_size**2 + 1) * width
    merged = width * vision.downsample_ratio**2
    projector = (merged + 1) * out + (out + 1) * out + 3 * out
    return vision.num_layers * layer + patches + width + projector


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters by part, and four sums.

    Sums: `backbone` (everything but the Engram tables and their projections, the drafter and
    vision; V4.1: 551.6 B, of which attention, MoE, embedding and head are 551.5 B), `engram`
    (V4.1: 196.6 B, nearly all table), `active_decode` (matrices that one decoded token multiplies:
    attention, its routed and the shared experts, and the head; V4.1: 15.6 B; the router, the
    indexer, the stream mixers and Engram's projections, 0.5 B more, are not counted by the report)
    and `total`.
    """
    layers, width = model.num_layers, model.hidden_size
    counts = {
        "attention": layers * attention_parameters(model),
        "moe": layers * moe_parameters(model, model.num_experts),
        "router_biases": 2 * layers * model.num_experts,
        "embedding": model.vocab_size * width,
        "head": model.vocab_size * width,
        "compressor": compressor_parameters(model),
        "indexer": indexer_parameters(model),
        "hyper_connections": layers * hyper_connection_parameters(model),
        "norms": layers * _norms_and_sinks(model) + width,
    }
    backbone = sum(counts.values())
    tables = projections = 0
    if model.engram:
        tables = sum(model.engram.num_embeddings) * model.engram.head_dim
        projections = len(model.engram.layer_ids) * _engram_projection(model, model.engram)
    experts = model.num_active_experts + model.num_shared_experts
    counts |= {
        "engram_tables": tables,
        "engram_projections": projections,
        "draft": _draft_parameters(model),
        "vision": _vision_parameters(model),
    }
    total = sum(counts.values())
    active = layers * experts * expert_parameters(model) + counts["attention"] + counts["head"]
    return counts | {
        "backbone": backbone,
        "engram": tables + projections,
        "active_decode": active,
        "total": total,
    }
