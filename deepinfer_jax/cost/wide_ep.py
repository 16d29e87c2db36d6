"""The roofline against public wide-EP throughputs of DeepSeek-V3 and R1, error row by row.

Nothing is tuned to these rows. Three predictions stand beside each: all peaks with the exchange
hidden behind computation as far as that lasts (a bound), kernel efficiencies from public tables
with the exchange hidden, and the same with nothing hidden. Both systems overlap two batches, so the
truth should lie between the last two. It does not: SGLang's rows sit at the serial end, vLLM's
below it.

What is approximate: the model is reduced to its parameter counts and one attention formula; routing
is even; the decode context is the mean over a request's life where the workload gives it; the
exchange uses DeepEP's H800 tables for H100 and H200 too and is proportional to the rows;
scheduling, sampling and host time are left out.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.cost import operations as ops
from deepinfer_jax.cost.exchange import (
    LOW_LATENCY_H800,
    NORMAL_H800,
    WireFormat,
    bandwidth_at,
    node_copies,
)
from deepinfer_jax.cost.hardware import H100, H200, Hardware
from deepinfer_jax.cost.roofline import PEAK, Efficiency, step_time
from deepinfer_jax.cost.work import StepWork, Work, touched_experts

KERNEL_EFFICIENCY = Efficiency(compute=0.67, memory=0.63)
"""From kernel tables alone: FlashMLA 660 of 989 TFLOP/s (README); DeepGEMM 1.2-1.5 of 1.98 PFLOP/s
at large M and 1.5-2.7 of 3.35 TB/s at M = 64 and 128 (README), the middle of each."""


@dataclasses.dataclass(frozen=True)
class LatentMoE:
    """A DeepSeek-V3 reduced to what a step multiplies and moves. Parameters are counts.

    Weights are FP8 (one byte), attention runs in BF16 over a cache of `kv_bytes` per token and
    layer. Decode attends in the latent space (`heads * (kv_rank + rope) + heads * kv_rank`
    multiply-adds per pair), prefill in the expanded one.
    """

    layers: int = 61
    moe_layers: int = 58
    hidden: int = 7168
    attention: int = 187_105_280  # per layer: q 11.0 + 37.7, kv 4.1 + 16.8, o 117.4 million
    dense: int = 3 * 396_361_728  # the three dense MLPs together, 3 x 7168 x 18432 each
    expert: int = 44_040_192  # 3 x 7168 x 2048
    experts: int = 256
    active: int = 8
    head: int = 926_679_040
    heads: int = 128
    latent_pair: int = 576 + 512
    expanded_pair: int = 192 + 128
    kv_bytes: int = 1152  # BF16; 656 in the FP8 layout

    @property
    def active_parameters(self) -> int:
        """Multiplied per token, one shared expert included (published: 37 B with the embedding)."""
        experts = self.moe_layers * (self.active + 1) * self.expert
        return self.layers * self.attention + self.dense + experts + self.head

    def work(
        self,
        tokens: int,
        sampled: int,
        pairs: float,
        pair: int,
        cached: float,
        ranks: int,
        slots: int,
    ) -> list[Work]:
        """Parts of one rank's step.

        Args:
          tokens: rows of the rank. sampled: rows with logits. pairs: (query, key) pairs of one
            layer. pair: multiply-adds per head and pair. cached: tokens of KV read per layer.
          ranks: EP = DP.
          slots: routed expert slots per rank, redundant ones included.
        """
        local = touched_experts(slots, self.active, self.experts, ranks * tokens)
        routed = self.moe_layers * self.expert
        linear = self.layers * self.attention + self.dense + self.moe_layers * self.expert
        core = ops.BF16 * self.layers * self.heads * pair * pairs
        return [
            Work("attention core", ops.BF16, core, self.layers * self.kv_bytes * cached),
            Work("linear", ops.FP8, ops.FP8 * linear * tokens, linear),
            Work(
                "routed experts", ops.FP8, ops.FP8 * routed * self.active * tokens, routed * local
            ),
            Work("head", ops.BF16, ops.BF16 * self.head * sampled, 2 * self.head),
        ]


DEEPSEEK_V3 = LatentMoE()


@dataclasses.dataclass(frozen=True)
class PublicRow:
    """One published throughput, tokens/s per GPU, and the workload it was measured with.

    `tokens` rows per GPU and step; `context` the prompt length (prefill) or the mean context
    (decode); `tau` tokens per request-step with `tokens / requests` rows each.
    """

    name: str
    hardware: Hardware
    phase: str  # "prefill" or "decode"
    ranks: int
    slots: int
    requests: int
    tokens: int
    context: int
    published: float
    tau: float = 1.0


def _lmsys_prefill(prompt: int, per_node: float, note: str = "") -> PublicRow:
    name = f"SGLang 96xH100 prefill EP32, {prompt} in{note}"
    count = 16_384 // prompt
    return PublicRow(name, H100, "prefill", 32, 9, count, 16_384, prompt, per_node / 8)


def _lmsys_decode(
    note: str, requests: int, context: int, per_node: float, tau: float = 1.0
) -> PublicRow:
    name = f"SGLang 96xH100 decode EP72, {note}"
    return PublicRow(name, H100, "decode", 72, 4, requests, 256, context, per_node / 8, tau)


def _vllm_decode(ranks: int, published: float) -> PublicRow:
    name = f"vLLM H200 decode EP{ranks}, 256 per rank"
    slots = -(-256 // ranks)
    return PublicRow(name, H200, "decode", ranks, slots, 256, 256, 3000, published)


def _vllm_prefill(ranks: int, published: float) -> PublicRow:
    name = f"vLLM H200 prefill EP{ranks}, 2000 in"
    return PublicRow(name, H200, "prefill", ranks, 256 // ranks, 8, 16_000, 2000, published)


PUBLIC_ROWS = (
    _lmsys_prefill(1024, 57_674),
    _lmsys_prefill(2048, 54_543),
    _lmsys_prefill(4096, 50_302),
    _lmsys_prefill(4096, 59_337, ", perfect balance"),
    _lmsys_decode("256 per rank", 256, 2048, 22_282),
    _lmsys_decode("simulated MTP", 128, 4096, 17_373, tau=1.6),
    _vllm_decode(32, 2190),
    _vllm_decode(72, 2070),
    _vllm_decode(96, 1975),
    _vllm_prefill(8, 6520),
    _vllm_prefill(16, 7010),
    _vllm_prefill(32, 5110),
)
"""LMSYS blog, 2025-05-05 (per node of 8); vLLM blog, 2025-12-17 (read from figures, about 2 %).
vLLM's prefill batch is not stated; 16,000 tokens per GPU and step are assumed. The SGLang MTP row
verifies two rows per request, its drafter is left out, and 60 % acceptance makes 1.6 tokens."""


def _copies(row: PublicRow, model: LatentMoE) -> float:
    """Rows a rank sends per layer: per expert in decode, per node (or GPU of one) in prefill."""
    if row.phase == "decode":
        return float(row.tokens * model.active)
    nodes = row.ranks // 8
    return row.tokens * (
        node_copies(nodes, model.active, 4)
        if nodes > 1
        else node_copies(row.ranks, model.active, row.ranks)
    )


def _step(row: PublicRow, model: LatentMoE) -> StepWork:
    if row.phase == "decode":
        pairs, pair, cached = (
            row.tokens * row.context,
            model.latent_pair,
            row.requests * row.context,
        )
        sampled = row.tokens
    else:
        pairs = row.requests * row.context * (row.context + 1) // 2
        pair, cached, sampled = model.expanded_pair, row.tokens, row.requests
    parts = model.work(row.tokens, sampled, pairs, pair, cached, row.ranks, row.slots)
    wire, sent = WireFormat(), _copies(row, model) * model.moe_layers
    return StepWork(
        tuple(parts), sent * wire.dispatch_row(model.hidden), sent * wire.combine_row(model.hidden)
    )


def predict(
    row: PublicRow,
    efficiency: Efficiency = PEAK,
    *,
    hidden_exchange: bool = True,
    model: LatentMoE = DEEPSEEK_V3,
) -> float:
    """Tokens/s per GPU, the exchange behind computation as far as that lasts, or after it."""
    table = LOW_LATENCY_H800 if row.phase == "decode" else NORMAL_H800
    step = step_time(_step(row, model), row.hardware, bandwidth_at(table, row.ranks), efficiency)
    seconds = max(step.local, step.exchange) if hidden_exchange else step.seconds
    return (row.requests * row.tau if row.phase == "decode" else row.tokens) / seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Published and predicted tokens/s per GPU (see the module's first lines)."""

    name: str
    published: float
    bound: float
    hidden: float
    serial: float

    @property
    def errors(self) -> tuple[float, float, float]:
        """predicted / published - 1, for the bound, hidden and serial exchange."""
        predicted = (self.bound, self.hidden, self.serial)
        return tuple(p / self.published - 1 for p in predicted)  # type: ignore[return-value]


def wide_ep_rows() -> list[Comparison]:
    """Every public row beside its three predictions."""
    return [
        Comparison(
            row.name,
            row.published,
            predict(row),
            predict(row, KERNEL_EFFICIENCY),
            predict(row, KERNEL_EFFICIENCY, hidden_exchange=False),
        )
        for row in PUBLIC_ROWS
    ]


def format_rows(rows: list[Comparison]) -> str:
    """A table of `rows`, one line each: tokens/s per GPU and relative errors."""
    lines = [f"{'public row':52s} published     bound    hidden    serial   errors"]
    for row in rows:
        errors = " ".join(f"{error:+5.0%}" for error in row.errors)
        values = " ".join(f"{v:9.0f}" for v in (row.published, row.bound, row.hidden, row.serial))
        lines.append(f"{row.name:52s} {values}   {errors}")
    return "\n".join(lines)
