"""From logits to the distribution that is sampled, and a draw from it. Pure, jittable, no sync.

Order: bias, penalties, grammar mask and stop ids before `min_tokens`, temperature, then top-p,
top-k and min-p as in `sampling_filters`, and a log-softmax over what is left. S sequences, Q rows
(drafts + 1), V ids. Every operation works row by row: a row's result does not depend on the others.

Temperature 0 is a point mass on the lowest id of the largest logit. The released engine replaces it
by 1e-5 and samples, so that exact ties are drawn at random there. Drawing from a point mass and
verifying against one need no special case, which makes greedy decoding with drafts equal to greedy
decoding without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.engine import penalties, sampling_filters
from deepinfer_jax.engine.randomness import seed_words
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams

Array = Any

MASKED = -1e30
"""Log-probability of what cannot be drawn: finite, so that no row of masks makes a NaN."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedSampling:
    """The parameters of S sequences: numpy as packed, jax under jit. V as an id means "none"."""

    temperature: Array  # float32 [S]
    top_p: Array  # float32 [S]
    top_k: Array  # int32 [S], V for off
    min_p: Array  # float32 [S]
    repetition: Array  # float32 [S]
    presence: Array  # float32 [S]
    frequency: Array  # float32 [S]
    bias_ids: Array  # int32 [S, limits.bias]
    bias_values: Array  # float32 [S, limits.bias]
    stop_ids: Array  # int32 [S, limits.stop_ids], end of sequence first unless ignored
    may_stop_from: Array  # int32 [S] first position where a stop id may be sampled
    seed: Array  # uint32 [S, 2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowContext:
    """What a step's rows depend on besides their logits."""

    positions: jax.Array  # int32 [S, Q] that the sampled tokens take
    drafts: jax.Array  # int32 [S, Q - 1] tokens behind row 0; V or more for none
    slots: jax.Array  # int32 [S] rows of `history`; out of range for none
    history: jax.Array | None = None  # int32 [slots, V], `penalties`; None: no penalties
    mask: jax.Array | None = None  # int32 [S, Q, ceil(V / 32)] bits of allowed ids; None: all


def pack(
    requests: Sequence[SamplingParams],
    seeds: Sequence[int],
    prompt_lengths: Sequence[int],
    *,
    sequences: int,
    vocab_size: int,
    eos_id: int,
    limits: SamplingLimits,
) -> PackedSampling:
    """Host arrays for `sequences` rows; those behind the requests are greedy padding.

    Args:
      seeds: of each answer, `sampling_params.seeds`.
      prompt_lengths: tokens; with min_tokens they say from where the request may stop.
    """
    padding = SamplingParams(temperature=0.0)
    padded = [*requests, *[padding] * (sequences - len(requests))]
    lengths = [*prompt_lengths, *[0] * (sequences - len(requests))]
    stops = [(() if p.ignore_eos else (eos_id,)) + p.stop_ids for p in padded]

    def column(name: str) -> np.ndarray:
        return np.array([getattr(p, name) for p in padded], np.float32)

    top_k = [vocab_size if p.top_k == -1 else min(p.top_k, vocab_size) for p in padded]
    return PackedSampling(
        temperature=column("temperature"),
        top_p=column("top_p"),
        top_k=np.array(top_k, np.int32),
        min_p=column("min_p"),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        bias_ids=_ragged([[i for i, _ in p.bias] for p in padded], limits.bias, vocab_size),
        bias_values=_ragged([[b for _, b in p.bias] for p in padded], limits.bias, 0.0),
        stop_ids=_ragged(stops, limits.stop_ids, vocab_size),
        may_stop_from=np.array(
            [n + p.min_tokens for n, p in zip(lengths, padded, strict=True)], np.int32
        ),
        seed=seed_words([*seeds, *[0] * (sequences - len(requests))]),
    )


def _ragged(rows: Sequence[Sequence[float]], width: int, fill: float) -> np.ndarray:
    """[len(rows), width], short rows filled up; int32 or float32 as `fill` is."""
    out = np.full((len(rows), width), fill, np.float32 if isinstance(fill, float) else np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def process(logits: jax.Array, packed: PackedSampling, context: RowContext) -> jax.Array:
    """Log-probabilities float32 [S, Q, V] that are sampled from; MASKED where that is impossible.

    A row whose ids are all masked comes back all MASKED; `draw` then gives id 0, and whoever made
    the mask must drop the request.

    Args:
      logits: [S, Q, V], any float type, finite.
    """
    scores = _bias(logits.astype(jnp.float32), packed)
    if context.history is not None:
        scores = penalties.penalise(
            scores,
            packed.repetition,
            packed.presence,
            packed.frequency,
            context.history,
            context.slots,
            context.drafts,
        )
    allowed = _may_stop(packed, context, scores.shape[-1])
    if context.mask is not None:
        allowed &= unpack_mask(context.mask, scores.shape[-1])
    greedy = packed.temperature == 0
    scaled = scores / jnp.where(greedy, 1, packed.temperature)[:, None, None]
    scaled = jnp.where(allowed, scaled, MASKED)
    kept = sampling_filters.keep(scaled, packed.top_p, packed.top_k, packed.min_p)
    best = jnp.argmax(scaled, axis=-1)[..., None] == jnp.arange(scores.shape[-1])
    kept = allowed & jnp.where(greedy[:, None, None], best, kept)
    return jnp.where(kept, jax.nn.log_softmax(jnp.where(kept, scaled, MASKED), axis=-1), MASKED)


def _bias(logits: jax.Array, packed: PackedSampling) -> jax.Array:
    sequence = jnp.arange(logits.shape[0])[:, None]
    addend = jnp.zeros((logits.shape[0], logits.shape[2]), jnp.float32)
    addend = addend.at[sequence, packed.bias_ids].add(packed.bias_values, mode="drop")
    return logits + addend[:, None]


def _may_stop(packed: PackedSampling, context: RowContext, vocabulary: int) -> jax.Array:
    """bool [S, Q, V]: False for stop ids at positions before `may_stop_from`."""
    sequence = jnp.arange(packed.stop_ids.shape[0])[:, None]
    stops = jnp.zeros((packed.stop_ids.shape[0], vocabulary), bool)
    stops = stops.at[sequence, packed.stop_ids].set(True, mode="drop")
    early = context.positions < packed.may_stop_from[:, None]
    return ~(early[..., None] & stops[:, None])


def unpack_mask(mask: jax.Array, vocabulary: int) -> jax.Array:
    """Bits int32 [..., ceil(V / 32)], id v in bit v % 32 of word v // 32, as bool [..., V]."""
    bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(*mask.shape[:-1], -1)[..., :vocabulary] == 1


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Token int32 [...] from weights float32 [..., V], not normalised, by inversion of their sums.

    An id of weight 0 is never drawn, however the sums round; if all are 0, id 0 is. Probabilities
    are right to about log2(V) rounding errors of 2**-24; rarer ids than that may never come.

    Args:
      uniform: float32 [...] in [0, 1).
    """
    sums = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    hit = possible & (sums > (uniform * sums[..., -1])[..., None])
    last = weights.shape[-1] - 1 - jnp.argmax(possible[..., ::-1], axis=-1)
    last = jnp.where(possible.any(-1), last, 0)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)


def holds_stop(tokens: jax.Array, count: jax.Array, packed: PackedSampling) -> jax.Array:
    """bool [S]: a stop id is among the first `count` int32 [S] of tokens int32 [S, Q].

    The drafts of such a request need no verification: set their confidences to 0 before lengths
    are chosen.
    """
    emitted = jnp.arange(tokens.shape[1]) < count[:, None]
    same = tokens[:, :, None] == packed.stop_ids[:, None, :]
    return (same & emitted[:, :, None]).any((1, 2))
