"""Lossless verification of drafts: rejection sampling (Leviathan et al., arXiv 2211.17192).

Draft x was drawn from p; the model's distribution after the same tokens is q; both are processed,
each by whatever rules. Accept x with probability min(1, q(x) / p(x)); at the first rejection draw
from max(q - p, 0), normalised, and drop the later drafts; if all are accepted, draw one more token
from the last row. The emitted tokens are distributed as if each had been drawn from its q.

What floating point leaves of that law. With P and Q the float32 values exp(log p) and exp(log q),
whose sums are 1 up to about 1e-6, the emitted token has law min(P, Q) + (1 - sum min(P, Q)) r with
r = max(Q - P, 0) normalised: Q up to those 1e-6. Uniforms are multiples of 2**-24, so a chance of
acceptance is rounded by less than that. No slack term is needed: if the residual has no mass (P and
Q equal but for rounding) the rejection itself had a chance of the order of the rounding, and Q is
drawn from instead.

A draft that q masks is rejected. A draft no proposal stands behind (a placeholder, an n-gram) is a
point mass at itself: accepted with chance q(x), replaced from q without x.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.engine.randomness import Use, uniforms
from deepinfer_jax.engine.sampling import MASKED, draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposals:
    """N drafts for each of S sequences, and what they were drawn from."""

    tokens: jax.Array  # int32 [S, N]; outside [0, V): rejected
    log_probs: jax.Array  # float32 [S, N, V] processed; ignored where `is_point`
    is_point: jax.Array  # bool [S] the proposals are point masses at the drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """Uniform numbers in [0, 1) of one verification."""

    accept: jax.Array  # float32 [S, N] one per draft
    residual: jax.Array  # float32 [S, N] one per draft, should it be rejected
    fresh: jax.Array  # float32 [S, N + 1] one per row, should it be the last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verification emitted: `accepted` drafts and one token more."""

    tokens: jax.Array  # int32 [S, N + 1]; V behind the emitted ones
    count: jax.Array  # int32 [S] emitted: accepted + 1, 0 for an idle sequence
    accepted: jax.Array  # int32 [S]
    final: jax.Array  # int32 [S] the last emitted token, next step's row 0
    accept_prob: (
        jax.Array
    )  # float32 [S, N] sum of min(p, q): chance of any draft there; 0 unverified


def noise(words: jax.Array, positions: jax.Array) -> Noise:
    """Numbers for seeds uint32 [S, 2] and the positions int32 [S, N + 1] of the emitted tokens."""
    return Noise(
        accept=uniforms(words, positions[:, :-1], Use.ACCEPT),
        residual=uniforms(words, positions[:, :-1], Use.RESIDUAL),
        fresh=uniforms(words, positions, Use.FRESH),
    )


def verify(
    proposals: Proposals,
    log_q: jax.Array,
    count: jax.Array,
    chance: Noise,
    forced: jax.Array | None = None,
) -> Verdict:
    """Accepted drafts and the token after them, for every sequence.

    Args:
      log_q: float32 [S, N + 1, V], processed; row j follows draft j.
      count: int32 [S] rows to use, 1 .. N + 1: the last one is a fresh draw, the others verify a
        draft each. 0 for an idle sequence. N may be 0.
      forced: int32 [S, N + 1], a token to emit at each row, negative for none: a draft is then
        accepted iff it is that token.
    """
    vocabulary = log_q.shape[-1]
    verified = jnp.arange(proposals.tokens.shape[1]) < count[:, None] - 1
    right = chance.accept < acceptance(proposals, log_q[:, :-1])
    if forced is not None:
        ask = forced[:, :-1]
        right = jnp.where(ask < 0, right, ask == proposals.tokens)
    prefix = jnp.cumprod((right & verified).astype(jnp.int32), axis=1)
    accepted = prefix.sum(1, dtype=jnp.int32)
    rejected = accepted < count - 1
    final = _final(proposals, log_q, accepted, rejected, chance)
    if forced is not None:
        ask = _at(forced, accepted)
        final = jnp.where(ask < 0, final, ask)
    emitted = jnp.where(count > 0, accepted + 1, 0)
    row = jnp.arange(log_q.shape[1])
    drafts = jnp.pad(proposals.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(row < accepted[:, None], drafts, final[:, None])
    estimate = overlap(proposals, log_q[:, :-1])
    return Verdict(
        tokens=jnp.where(row < emitted[:, None], tokens, vocabulary).astype(jnp.int32),
        count=emitted,
        accepted=accepted,
        final=final,
        accept_prob=jnp.where(verified, estimate, 0),
    )


def acceptance(proposals: Proposals, log_q: jax.Array) -> jax.Array:
    """Chance float32 [S, N] that each draft is accepted: min(1, q(x) / p(x)), log_q [S, N, V]."""
    index = proposals.tokens[..., None]
    known = (index >= 0) & (index < log_q.shape[-1])
    safe = jnp.where(known, index, 0)
    target = jnp.take_along_axis(log_q, safe, axis=-1)
    source = jnp.take_along_axis(proposals.log_probs, safe, axis=-1)
    source = jnp.where(proposals.is_point[:, None, None], 0, source)
    possible = known & (target > MASKED)
    return jnp.where(possible, jnp.exp(jnp.minimum(0, target - source)), 0)[..., 0]


def overlap(proposals: Proposals, log_q: jax.Array) -> jax.Array:
    """Chance float32 [S, N] that a draft drawn from p is accepted: sum of min(p, q)."""
    drawn = jnp.minimum(jnp.exp(proposals.log_probs), jnp.exp(log_q)).sum(-1)
    point = acceptance(proposals, log_q)  # p(x) = 1 there
    return jnp.where(proposals.is_point[:, None], point, jnp.minimum(drawn, 1))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Weights [..., V] of the token that replaces a rejected draft; q where there is no mass."""
    rest = jnp.maximum(q - p, 0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, q)


def _final(
    proposals: Proposals,
    log_q: jax.Array,
    accepted: jax.Array,
    rejected: jax.Array,
    chance: Noise,
) -> jax.Array:
    """The token int32 [S] after the accepted drafts: residual or fresh."""
    q = jnp.exp(_at(log_q, accepted))
    if proposals.tokens.shape[1] == 0:
        return draw(q, chance.fresh[:, 0])
    p = jnp.exp(_at(proposals.log_probs, accepted))
    point = _at(proposals.tokens, accepted)[:, None] == jnp.arange(q.shape[-1])
    p = jnp.where(proposals.is_point[:, None], point, p)
    weights = jnp.where(rejected[:, None], residual(p, q), q)
    numbers = _at(chance.residual, accepted), _at(chance.fresh, accepted)
    return draw(weights, jnp.where(rejected, *numbers))


def _at(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows [S, R, ...] at index int32 [S], the last row for a larger index."""
    index = jnp.minimum(index, rows.shape[1] - 1)
    return rows[jnp.arange(rows.shape[0]), index]
