"""Our model on the dense memory, driven as the references are: whole prompts, chunks, rollbacks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.cache.dense import DenseMemory, create_dense
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import backbone, draft
from deepinfer_jax.model.numerics import EXACT, RELEASED
from deepinfer_jax.model.rows import text_rows

Array = npt.NDArray[Any]
CHUNK = 12  # rows of the compiled chunk step; shorter chunks are padded

# Nothing here runs long enough to repay an optimising compiler.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(_jit, static_argnames=("config", "rounding", "truncation", "keep"))
def _step(
    params: Any,
    memory: DenseMemory,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    lookback: jax.Array,
    kept_start: jax.Array,
    config: ModelConfig,
    rounding: bool,
    truncation: str,
    keep: int,
) -> tuple[jax.Array, DenseMemory]:
    rows = text_rows(config, tokens, start, count, lookback=lookback, kept_start=kept_start)
    out, memory = backbone.forward(
        params,
        config,
        rows,
        memory,
        truncation=truncation,
        keep=keep,
        numerics=RELEASED if rounding else EXACT,
    )
    return backbone.logits(params, config, out.hidden), memory


def empty(config: ModelConfig, capacity: int) -> DenseMemory:
    """An empty memory of one sequence."""
    return create_dense(config, 1, capacity, jnp.float32)


def extend(
    params: Any,
    config: ModelConfig,
    memory: DenseMemory,
    ids: Array,
    start: int,
    count: int,
    width: int,
    *,
    rounding: bool = True,
    truncation: str = "off",
    keep: int = 0,
) -> tuple[Array, DenseMemory]:
    """Logits [count or keep, V] of ids[start : start + count], computed as `width` rows.

    With a truncation, the last `keep` rows of `ids` are the kept ones.
    """
    padded = np.zeros((1, width), np.int32)
    padded[0, :count] = ids[start : start + count]
    back = config.engram.max_ngram - 1 if config.engram else 0
    history = [ids[p] if p >= 0 else -1 for p in range(start - back, start)]
    one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
    logits, memory = _step(
        params,
        memory,
        jnp.asarray(padded),
        one(start),
        one(count),
        jnp.asarray(np.array(history, np.int32).reshape(1, back)),
        one(len(ids) - keep if truncation != "off" else 0),
        config,
        rounding,
        truncation,
        keep if truncation == "compact" else 0,
    )
    return np.asarray(logits[0, :count]), memory


def prompt(
    params: Any, config: ModelConfig, ids: Array, *, rounding: bool = True, **truncated: Any
) -> tuple[Array, DenseMemory]:
    """Logits of all of `ids` [T] (compact: of the last `keep`) in one step, and the memory."""
    memory = empty(config, len(ids))
    return extend(
        params, config, memory, ids, 0, len(ids), len(ids), rounding=rounding, **truncated
    )


def in_chunks(
    params: Any, config: ModelConfig, ids: Array, lengths: list[int], *, rounding: bool = True
) -> Array:
    """Logits [T, V] of `ids` [T] taken as chunks of `lengths`, then of CHUNK; ones are decoded."""
    memory, at, parts = empty(config, len(ids)), 0, []
    pending = list(lengths)
    while at < len(ids):
        count = min(pending.pop(0) if pending else CHUNK, len(ids) - at)
        width = 1 if count == 1 else CHUNK
        logits, memory = extend(params, config, memory, ids, at, count, width, rounding=rounding)
        parts.append(logits)
        at += count
    return np.concatenate(parts)


@functools.partial(_jit, static_argnames=("config", "rounding"))
def _draft(
    params: Any,
    memory: DenseMemory,
    token: jax.Array,
    position: jax.Array,
    config: ModelConfig,
    rounding: bool,
) -> draft.Drafts:
    assert config.draft is not None
    return draft.propose(
        params,
        config,
        token,
        position,
        memory,
        config.draft.block_size,
        numerics=RELEASED if rounding else EXACT,
    )


def drafted(
    params: Any, config: ModelConfig, ids: Array, width: int, *, rounding: bool = True
) -> tuple[int, Array, Array]:
    """The token after `ids`, and the tokens [N] and confidences [N] drafted behind it."""
    memory, count = empty(config, width), len(ids)
    logits, memory = extend(params, config, memory, ids, 0, count, width, rounding=rounding)
    token = jnp.argmax(jnp.asarray(logits[-1:]), axis=-1).astype(jnp.int32)
    position = jnp.full((1,), count, jnp.int32)
    made = _draft(params, memory, token, position, config, rounding)
    return int(token[0]), np.asarray(made.tokens[0]), np.asarray(made.confidence[0])


@functools.partial(_jit, static_argnames=("config", "rounding"))
def _illustrated(
    params: Any,
    tokens: jax.Array,
    is_image: jax.Array,
    embeddings: jax.Array,
    config: ModelConfig,
    rounding: bool,
) -> jax.Array:
    none = jnp.zeros((1,), jnp.int32)
    rows = text_rows(config, jnp.where(is_image, -1, tokens), none, none + tokens.shape[1])
    rows = dataclasses.replace(rows, is_image=is_image, embeddings=embeddings)
    memory = empty(config, tokens.shape[1])
    numerics = RELEASED if rounding else EXACT
    out, _ = backbone.forward(params, config, rows, memory, numerics=numerics)
    return backbone.logits(params, config, out.hidden)


def illustrated(
    params: Any, config: ModelConfig, ids: Array, is_image: Array, embeddings: Array, rounding: bool
) -> Array:
    """Logits [T, V] of a prompt whose rows `is_image` [T] have their `embeddings` [T, D]."""
    tokens, where = jnp.asarray(ids, jnp.int32)[None], jnp.asarray(is_image)[None]
    made = _illustrated(params, tokens, where, jnp.asarray(embeddings)[None], config, rounding)
    return np.asarray(made[0])
