"""What one step of the model works on: Q consecutive tokens of each of S sequences.

The rectangular form serves every case: a prompt or a chunk of one (Q its bucket), a decode step
(Q = 1), a verify step (Q = drafts + 1). Rows behind a sequence's `count` are padding: they are
computed, and neither written nor routed to an expert nor seen by another row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram_hash import layer_hashes
from deepinfer_jax.model.engram_rows import BLOCKED, row_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A step's input. Positions are absolute."""

    tokens: jax.Array  # int32 [S, Q]
    start: jax.Array  # int32 [S] position of row 0
    count: jax.Array  # int32 [S] rows that are tokens; 0 for an idle sequence
    engram: tuple[jax.Array, ...]  # per Engram layer int32 [S, Q, rows_per_token]
    is_image: jax.Array  # bool [S, Q] rows of an image: other router bias, no Engram
    embeddings: jax.Array | None  # [S, Q, D] stand in for the embedding where is_image
    window_start: jax.Array  # int32 [S] rings hold nothing before it (encoder replay)
    global_start: jax.Array  # int32 [S] groups of tokens before it are stored already: kept as is
    kept_start: jax.Array  # int32 [S] decoder windows reach back no further (truncation)
    index: jax.Array | None = (
        None  # int32 [S, Q] row numbers of a share (`shares`); None: 0 .. Q - 1
    )
    own: jax.Array | None = None  # bool [S, Q] rows of the share that are tokens

    @property
    def positions(self) -> jax.Array:
        """int32 [S, Q]."""
        row = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return self.start[:, None] + (row if self.index is None else self.index)

    @property
    def valid(self) -> jax.Array:
        """bool [S, Q]: rows that are tokens."""
        if self.own is not None:
            return self.own
        return jnp.arange(self.tokens.shape[1]) < self.count[:, None]


def text_rows(
    config: ModelConfig,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    lookback: jax.Array | None = None,
    token_map: jax.Array | None = None,
    kept_start: jax.Array | None = None,
    window_start: jax.Array | None = None,
    global_start: jax.Array | None = None,
) -> Rows:
    """Rows of text, Engram's look-ups included; usable under jit.

    Args:
      tokens: int32 [S, Q].
      start, count: int32 [S].
      lookback: ids of the max_ngram - 1 tokens before each sequence's row 0, oldest first, int32
        [S, max_ngram - 1]; negative where there is none. Needed with Engram unless start is 0.
        Ids of no token, those of image rows too, block the n-grams that reach to them.
      token_map: token id -> compressed id, int32 [V] (`engram_vocabulary.token_map`); by default
        token t is t modulo the compressed vocabulary.
      kept_start, window_start, global_start: see `Rows`; default 0.
    """
    none = jnp.zeros_like(start)
    return Rows(
        tokens=tokens,
        start=start,
        count=count,
        engram=engram_look_ups(config, tokens, lookback, token_map),
        is_image=jnp.zeros(tokens.shape, bool),
        embeddings=None,
        window_start=none if window_start is None else window_start,
        global_start=none if global_start is None else global_start,
        kept_start=none if kept_start is None else kept_start,
    )


def engram_look_ups(
    config: ModelConfig,
    tokens: jax.Array,
    lookback: jax.Array | None = None,
    token_map: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Table rows int32 [S, Q, rows_per_token] per Engram layer; arguments as for `text_rows`."""
    engram = config.engram
    if engram is None:
        return ()
    if token_map is None:
        token_map = jnp.arange(config.vocab_size, dtype=jnp.int32) % engram.compressed_vocab_size
    if lookback is None:
        lookback = jnp.full((tokens.shape[0], engram.max_ngram - 1), BLOCKED, jnp.int32)

    def compressed(ids: jax.Array) -> jax.Array:
        known = (ids >= 0) & (ids < config.vocab_size)
        return jnp.where(known, token_map[jnp.where(known, ids, 0)], BLOCKED)

    pad = token_map[engram.pad_token_id]
    hashes = (dataclasses.replace(layer, pad=pad) for layer in layer_hashes(engram, 0))
    made = (row_ids(layer, compressed(tokens), compressed(lookback)) for layer in hashes)
    return tuple(_kept(rows) for rows in made)


def _kept(x: jax.Array) -> jax.Array:
    """x, behind an operation that XLA:CPU does not fuse.

    Fused into the look-up, hashes would be computed for every element of a row: 20 times slower.
    """
    return jnp.sort(jnp.stack([x, x], axis=-1), axis=-1)[..., 0]


def last(rows: Rows, width: int) -> Rows:
    """The last `width` rows of each sequence (all of them if it has fewer), as Rows of their own."""
    offset = jnp.maximum(rows.count - width, 0)

    def cut(x: jax.Array) -> jax.Array:
        return take(x, offset, width)

    return dataclasses.replace(
        rows,
        tokens=cut(rows.tokens),
        start=rows.start + offset,
        count=rows.count - offset,
        engram=tuple(cut(x) for x in rows.engram),
        is_image=cut(rows.is_image),
        embeddings=None if rows.embeddings is None else cut(rows.embeddings),
    )


def take(x: jax.Array, offset: jax.Array, width: int) -> jax.Array:
    """x[s, offset[s] : offset[s] + width] for every sequence: [S, Q, ...] to [S, width, ...]."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(x, offset)
