"""Repetition, presence and frequency penalties from counts that live on the device.

A request's history is one row of int32 [slots, V]: bit 0 says that the token is in the prompt, the
bits above count it in the output. Rows are updated by the very step that emits the tokens, so they
are right under overlap, when the host knows the tokens one step later. 4 bytes x V per slot: 0.5 MB
for V4.1's 129,280 ids, 160 MB for 308 slots. The bytes are read only in steps where some request
has a penalty.

Within a verify step, row j has also seen drafts 1..j.

Repetition (CTRL, arXiv 1909.05858): a positive logit of a seen token is divided by the penalty, a
negative one multiplied. Presence and frequency (OpenAI's API): count > 0 costs `presence`, each
occurrence costs `frequency`; the prompt does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

IN_PROMPT, IN_OUTPUT = 1, 2  # what one occurrence adds to a cell


def create(slots: int, vocab_size: int) -> jax.Array:
    """Empty histories: int32 [slots, V]."""
    return jnp.zeros((slots, vocab_size), jnp.int32)


def history_of(tokens: Sequence[int], prompt_length: int, vocab_size: int) -> np.ndarray:
    """The row int32 [V] of a request that has these tokens so far, made on the host.

    Tokens of images, whose ids lie behind the vocabulary, do not count.
    """
    counts = np.zeros(vocab_size, np.int32)
    prompt, output = np.split(np.array(tokens), [prompt_length])
    np.add.at(counts, output, IN_OUTPUT)
    counts[prompt[prompt < vocab_size]] |= IN_PROMPT
    return counts


def forget(history: jax.Array, slots: jax.Array) -> jax.Array:
    """Empty the rows `slots` int32 [S] for new tenants; a slot out of range does nothing."""
    return history.at[slots].set(0, mode="drop")


def see_prompt(history: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mark prompt tokens int32 [S, Q] (V or more: padding). Before any output of the request."""
    return history.at[slots[:, None], tokens].set(IN_PROMPT, mode="drop")


def see_output(history: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Count emitted tokens int32 [S, Q] (V or more: padding)."""
    return history.at[slots[:, None], tokens].add(IN_OUTPUT, mode="drop")


def seen_by_rows(history: jax.Array, slots: jax.Array, drafts: jax.Array) -> jax.Array:
    """What each row of a verify step has seen: int32 [S, Q, V], drafts int32 [S, Q - 1]."""
    sequences, count = drafts.shape
    own = history.at[slots].get(mode="fill", fill_value=0)[:, None]
    rows = jnp.broadcast_to(own, (sequences, count + 1, history.shape[1]))
    row, draft = jnp.arange(count + 1)[:, None], jnp.arange(count)
    add = jnp.broadcast_to(jnp.where(draft < row, IN_OUTPUT, 0), (sequences, count + 1, count))
    sequence = jnp.arange(sequences)[:, None, None]
    return rows.at[sequence, row, drafts[:, None]].add(add, mode="drop")


def penalise(
    logits: jax.Array,
    repetition: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
    history: jax.Array,
    slots: jax.Array,
    drafts: jax.Array,
) -> jax.Array:
    """Logits float32 [S, Q, V] after the penalties float32 [S]; untouched if all are neutral."""

    def apply() -> jax.Array:
        seen = seen_by_rows(history, slots, drafts)
        factor = repetition[:, None, None]
        scaled = jnp.where(logits > 0, logits / factor, logits * factor)
        count = seen >> 1
        cost = presence[:, None, None] * (count > 0) + frequency[:, None, None] * count
        return jnp.where(seen > 0, scaled, logits) - cost

    active = (repetition != 1) | (presence != 0) | (frequency != 0)
    return lax.cond(jnp.any(active), apply, lambda: logits)
