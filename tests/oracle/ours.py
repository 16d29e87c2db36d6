"""Our model on the dense memory, driven as the references are: whole prompts, chunks, rollbacks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.cache.dense import DenseMemory, create_dense
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import backbone
from deepinfer_jax.model.numerics import EXACT, RELEASED
from deepinfer_jax.model.rows import text_rows

Array = npt.NDArray[Any]
CHUNK = 12  # rows of the compiled chunk step; shorter chunks are padded


@functools.partial(jax.jit, static_argnames=("config", "rounding", "truncation", "keep"))
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
