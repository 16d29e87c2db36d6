"""DualPath's traffic model: which prefill-to-decode ratios load KV without a bottleneck.

Source: DualPath, arXiv 2602.21548, sections 2 and 4. Cached KV may be read through the storage
card of the prefill node or of the decode node; split by node counts, all storage cards saturate.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Closed interval of prefill nodes per decode node; empty when `low > high`."""

    low: Fraction
    high: Fraction

    def contains(self, prefill_nodes: int, decode_nodes: int) -> bool:
        """Whether this many nodes keep every card and the memory below saturation."""
        return self.low <= Fraction(prefill_nodes, decode_nodes) <= self.high


def bottleneck_free_ratio(
    gpus: int = 8,
    storage_cards: int = 1,
    card_bytes_per_second: int = 50_000_000_000,
    memory_bytes_per_second: int = 500_000_000_000,
) -> Ratio:
    """Prefill nodes per decode node for which the storage cards are the only bottleneck.

    Args:
      gpus: per node, each with one compute network card.
      storage_cards: storage bandwidth of a node in units of one compute card.
      card_bytes_per_second: one compute card, one direction.
      memory_bytes_per_second: DRAM of a node.

    With the defaults, 1/7 to 7/2.
    """
    g, s = gpus, storage_cards
    if not 0 < s < g:
        raise ValueError(
            f"storage_cards={s} with {g} GPUs: the model needs 0 < storage_cards < gpus"
        )
    memory = Fraction(memory_bytes_per_second, card_bytes_per_second * s)
    low = Fraction(s, g - s)  # writes of the prefill card
    decode_read = Fraction(g - 2 * s, s)
    decode_write = Fraction(g - s, 2 * s)
    return Ratio(low, min(decode_read, decode_write, (memory - 3) / 2))


def ideal_speedup(prefill_nodes: int, decode_nodes: int) -> Fraction:
    """Gain over reading at the prefill nodes only, when storage reads are all that matters."""
    return Fraction(prefill_nodes + decode_nodes, prefill_nodes)


@dataclasses.dataclass(frozen=True)
class CacheIntensity:
    """What one new token costs to compute and one cached token to load.

    `linear_flops` and `fixed_flops` per new token, `context_flops` per new token and context token.
    """

    name: str
    kv_bytes: float
    linear_flops: float
    context_flops: float
    fixed_flops: float = 0.0

    def gigabytes_per_petaflop(self, context: int, new_tokens: int) -> float:
        """Cached KV loaded per 1e15 FLOPs when `new_tokens` extend a cached `context`."""
        flops = new_tokens * (self.linear_flops + self.fixed_flops + self.context_flops * context)
        return self.kv_bytes * context / flops * 1e6


TABLE_1 = (
    CacheIntensity("Qwen2.5-32B", 262_144, 65e9, 4 * 40 * 128 * 64),
    CacheIntensity("GPT-OSS-120B", 18 * 2 * 8 * 64, 10.2e9, 4 * 64 * 64 * 18),
    CacheIntensity("Qwen3-235B", 96_256, 44e9, 4 * 64 * 128 * 94),
    CacheIntensity(
        "DeepSeek-V3.2", 656 * 61, 70.3e9, 2 * 64 * 128 * 61, 2048 * 2 * 128 * 1088 * 61
    ),
    CacheIntensity("DeepSeek-V3", 656 * 61, 74e9, 2 * 128 * 1088 * 61),
)
"""DualPath Table 1 (429 new tokens on 16K and 64K) from model shapes: KV bytes per token, twice the
active parameters, attention FLOPs per context token, and V3.2's top-2048 attention. GPT-OSS counts
its 18 full-attention layers; V3.2 its 64 x 128 indexer; index keys are not counted as KV."""

TABLE_1_PUBLISHED = {
    "Qwen2.5-32B": (117.0, 267.0),
    "GPT-OSS-120B": (47.0, 95.0),
    "Qwen3-235B": (39.0, 60.0),
    "DeepSeek-V3.2": (13.0, 36.0),
    "DeepSeek-V3": (4.8, 5.8),
}
"""GB per PFLOP at 16K and 64K of context, as printed."""
