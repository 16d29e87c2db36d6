"""Log-probabilities reported to the caller: of the token itself and of the likeliest ids.

The caller of the engine chooses the distribution: the model's own (log-softmax of the raw logits),
or the processed one a token was drawn from. The released engine reports the latter only; it floors
values at -9999, as is done here, because JSON has no infinity. Prompt log-probabilities are the
same report for prompt rows: row t with token t + 1, prompt length - 1 values in all.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = -9999.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """A report on one token per row; k alternatives, likeliest first, equals by ascending id."""

    chosen: jax.Array  # float32 [...]
    rank: jax.Array  # int32 [...] ids strictly likelier than the token; 0 for the likeliest
    ids: jax.Array  # int32 [..., k]
    values: jax.Array  # float32 [..., k]


def model_log_probs(logits: jax.Array) -> jax.Array:
    """The model's own distribution: float32 [..., V]."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def choose(model: jax.Array, processed: jax.Array, use_processed: jax.Array) -> jax.Array:
    """Per sequence, which of two log-probabilities [S, Q, V] to report; flags bool [S]."""
    return jnp.where(use_processed[:, None, None], processed, model)


def report(log_probs: jax.Array, tokens: jax.Array, k: int) -> Logprobs:
    """Report on `tokens` int32 [...] under log_probs float32 [..., V].

    Rows of padding tokens (V or more) get the floor and the last rank.
    """
    index = tokens[..., None]
    chosen = jnp.take_along_axis(log_probs, index, axis=-1, mode="fill", fill_value=FLOOR)
    values, ids = lax.top_k(log_probs, k)
    return Logprobs(
        chosen=jnp.maximum(chosen[..., 0], FLOOR),
        rank=(log_probs > chosen).sum(-1, dtype=jnp.int32),
        ids=ids,
        values=jnp.maximum(values, FLOOR),
    )
