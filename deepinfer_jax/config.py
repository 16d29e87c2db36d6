"""What a model and its cache are: frozen dataclasses whose validation names the broken rule.

Sources: the released DeepSeek-V4.1-Flash `config.json` and `inference/model.py`; the technical
report, arXiv 2609.19969, for the roles of the layers; the released DeepInfer 0.1.0 for the cache.
Layer numbers run over the backbone first, then over the draft stages (V4.1: 0..39, then 40..42).
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from functools import cached_property

from deepinfer_jax.rules import (
    TRUNCATION_MODES,
    check_engine,
    check_model,
    require,
    require_positive,
)


def _nearest(sources: tuple[int, ...], layer: int) -> int | None:
    at = bisect.bisect_right(sources, layer)
    return sources[at - 1] if at else None


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies: plain for ratio-0 layers, YaRN (frequencies only) for the others."""

    theta: float = 10_000.0
    compress_theta: float = 160_000.0
    yarn_factor: float = 16.0
    original_max_positions: int = 65_536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """N-gram memory: per token, (max_ngram - 1) * num_heads table rows of head_dim channels."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]  # table rows per Engram layer: a sum of distinct primes
    max_ngram: int
    num_heads: int
    head_dim: int
    vocab_size: int  # the primes ascend from here, never reused
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def rows_per_token(self) -> int:
        """Table rows one token looks up in one Engram layer (V4.1: 24)."""
        return (self.max_ngram - 1) * self.num_heads

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "head_dim", "vocab_size", "compressed_vocab_size")
        require(
            self.max_ngram >= 2,
            f"engram max_ngram is {self.max_ngram}; n-grams start at 2, so raise it",
        )
        require(
            len(self.num_embeddings) == len(self.layer_ids),
            f"engram num_embeddings has {len(self.num_embeddings)} entries for "
            f"{len(self.layer_ids)} layer_ids; give one per layer",
        )


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The parallel block drafter (DSpark, arXiv 2607.05147), stored as extra ratio-0 layers."""

    num_layers: int  # stages, not draft length
    block_size: int  # draft length the weights were trained for
    noise_token_id: int
    target_layer_ids: tuple[int, ...]  # backbone layers whose stream means feed it
    markov_rank: int
    num_experts: int
    num_active_experts: int

    def __post_init__(self) -> None:
        require_positive(self, "num_layers", "block_size", "markov_rank", "num_active_experts")
        require(
            self.num_active_experts <= self.num_experts,
            f"draft num_active_experts is {self.num_active_experts} of {self.num_experts}; "
            "a token cannot visit more experts than there are, so lower it",
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The image encoder and the 3x3-merging projector; images are prefill only."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    image_token_id: int

    def __post_init__(self) -> None:
        require_positive(self, *(f.name for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model of the V4.1 family. Widths in channels; see presets.py for the released sizes.

    `compress_ratios` has one entry per backbone layer, then one 0 per draft stage: 0 reads the
    sliding window only, r also reads a global memory that keeps one row per r tokens. That memory
    is written by `kv_source_layer_ids` and selected by `index_source_layer_ids`; every other layer
    with r > 0 uses the nearest source at or before it.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_shared_experts: int
    num_active_experts: int
    moe_intermediate_size: int
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    routed_scaling: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iterations: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-20
    max_positions: int = 1_048_576
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    use_fp4_sparse_kv: bool = True
    rope: RopeConfig = RopeConfig()
    engram: EngramConfig | None = None
    draft: DraftConfig | None = None
    vision: VisionConfig | None = None

    @property
    def num_draft_layers(self) -> int:
        """Draft stages, each with a sliding-window ring of its own."""
        return self.draft.num_layers if self.draft else 0

    @property
    def num_rings(self) -> int:
        """Sliding-window rings of one request: one per backbone layer and draft stage."""
        return self.num_layers + self.num_draft_layers

    @cached_property
    def boundary_layer(self) -> int:
        """First decoder layer: the first whose ratio is 1 (V4.1: 20). Producers lie below it."""
        return self.compress_ratios.index(1)

    @cached_property
    def kv_sources(self) -> tuple[int | None, ...]:
        """For each backbone layer, the layer whose global rows it reads; None at ratio 0."""
        return self._sources(self.kv_source_layer_ids)

    @cached_property
    def index_sources(self) -> tuple[int | None, ...]:
        """For each backbone layer, the layer that selects its global rows; None at ratio 0."""
        return self._sources(self.index_source_layer_ids)

    @cached_property
    def candidate_user_layer_ids(self) -> tuple[int, ...]:
        """Index sources that score only the candidate blocks (V4.1: 24, 28, 32, 36)."""
        source = self.candidate_source_layer_id
        if source is None:
            return ()
        return tuple(i for i in self.index_source_layer_ids if i > source)

    @cached_property
    def compression_layer_ids(self) -> tuple[int, ...]:
        """KV sources that pool several tokens per row, so keep raw rows of an unfinished group."""
        return tuple(i for i in self.kv_source_layer_ids if self.compress_ratios[i] > 1)

    def _sources(self, ids: tuple[int, ...]) -> tuple[int | None, ...]:
        ratios = self.compress_ratios[: self.num_layers]
        return tuple(_nearest(ids, i) if ratio else None for i, ratio in enumerate(ratios))

    def __post_init__(self) -> None:
        check_model(self)


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What is kept of a request. Lengths in tokens, extra rows in ring rows.

    `keep` is the number of last prompt tokens whose decoder layers are computed when `truncation`
    is not "off" (decoder replay). `extra_state` widens the live rings, so that the state as of an
    older block boundary can still be taken out of them. `reserve` is the number of last prompt
    tokens that are computed even when a cache holds them; below max(ring rows, keep), decoder
    windows would reach rows that were never restored, which only `unsafe_reserve` allows.
    """

    block_tokens: int = 128
    nextn: int = 5  # draft tokens verified per step, besides the sampled one
    backtracking: int = 0  # asked ring slack; at least nextn + 1 is granted
    truncation: str = "off"
    keep: int = 0
    extra_state: bool = False
    extra_size: int = 128
    reserve: int = 0  # 0: the least that is safe (`layout.prefix_reserve`)
    unsafe_reserve: bool = False

    @property
    def ring_slack(self) -> int:
        """Rows by which a ring exceeds the window: one verify step, or more if asked."""
        return max(self.backtracking, self.nextn + 1)

    @property
    def extra_rows(self) -> int:
        """Rows by which a live ring exceeds the ring that is handed over or stored."""
        truncated = self.keep if self.truncation != "off" else 0
        return self.extra_size + truncated if self.extra_state else 0

    def __post_init__(self) -> None:
        require_positive(self, "block_tokens")
        for name in ("nextn", "backtracking", "keep", "extra_size", "reserve"):
            value = getattr(self, name)
            require(value >= 0, f"CacheConfig.{name} is {value}; it may not be negative")
        require(
            self.truncation in TRUNCATION_MODES,
            f"truncation is {self.truncation!r}; choose one of {', '.join(TRUNCATION_MODES)}",
        )
        require(
            self.truncation == "off" or self.keep > 0,
            f"keep is {self.keep} with truncation {self.truncation!r}; give at least window + "
            "backtracking tokens",
        )


class Role(enum.StrEnum):
    """What an engine does of a request (the chapter, listing 11.1)."""

    NORMAL = "normal"  # prompts and completions
    PROMPT = "prompt"  # prompts, whose state is then handed over
    COMPLETION = "completion"  # completions of prompts handed over


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine forms its steps. Defaults are those of the released DeepInfer 0.1.0.

    With `overlap` the host plans a decode step while the previous one still runs, so one step is in
    flight; a prompt step is always waited for. The released default of `stop_preempted` is true for
    a service and false for offline use, as here.
    """

    cache: CacheConfig = CacheConfig()
    role: Role = Role.NORMAL
    max_model_len: int = 4096  # tokens of a request, prompt and output
    max_num_seqs: int = 256  # requests decoding at a time, and rows of a step
    max_num_batched_tokens: int = 0  # query rows of a step; 0: as many as the other fields ask
    max_prefill_context: int = 2**30  # tokens, cached ones included, of all prompts of a step
    chunked_prefill: bool = False  # a prompt may be spread over several steps
    min_chunk: int = 1  # tokens; a smaller rest of the budget waits for the next step
    chunk_multiple: int = 1  # tokens; where a budget cuts a prompt, it takes a multiple of it
    step_quota: int = 0  # femtoseconds of a prefill step by `StepCost`, base included; 0: no limit
    prefill_interval: int = 70  # decode steps until all ranks together may prefill
    prefill_any_interval: int = 100  # decode steps until one rank may make all others prefill
    prefill_usage_percent: int = 90  # fuller block pools admit no prompt while requests decode
    overlap: bool = True
    verification: str = "fixed"  # "confidence": only drafts that are likely to pay are verified
    stop_preempted: bool = False  # end a preempted request rather than compute it again
    kernels: str = "xla"  # who attends and multiplies: "tpu" kernels, or "interpret" to test them
    num_blocks: int = 1024  # of the block pool, the reserved one included
    slots_percent: int = 120  # state slots per 100 of max_num_seqs, the reserved one apart

    @property
    def step_rows(self) -> int:
        """Query rows one request may have in one decode step: its drafts and one more."""
        return self.cache.nextn + 1

    @property
    def batched_tokens(self) -> int:
        """The budget of query rows per step that holds (released default: at least 4096)."""
        asked = max(self.max_model_len, 4096, self.max_num_seqs * self.step_rows)
        return self.max_num_batched_tokens or asked

    @property
    def least_chunk(self) -> int:
        """Tokens a budget must leave for a prompt to be cut there: `min_chunk` in whole multiples."""
        return -(-self.min_chunk // self.chunk_multiple) * self.chunk_multiple

    @property
    def num_slots(self) -> int:
        """State slots, the reserved one included (256 requests: 308)."""
        return self.max_num_seqs * self.slots_percent // 100 + 1

    @property
    def runtime_max_len(self) -> int:
        """Positions a step may ever touch: drafts, the step in flight, and drafts of the drafter.

        4096 tokens with 5 drafts: 4112, or 4106 without overlap.
        """
        flying = self.step_rows if self.overlap else 0
        return self.max_model_len + flying + 2 * self.cache.nextn

    def __post_init__(self) -> None:
        check_engine(self)
