"""Prefill and decode steps lower for accelerators that are not here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.model import backbone
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import abstract
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.presets import tiny

CONFIG = tiny()


def step(params: Any, memory: PagedMemory, tokens: jax.Array, start: jax.Array) -> Any:
    """Logits of each sequence's last row, and the memory."""
    back = jnp.full((tokens.shape[0], CONFIG.engram.max_ngram - 1), 5, jnp.int32)
    rows = text_rows(CONFIG, tokens, start, jnp.full_like(start, tokens.shape[1]), lookback=back)
    out, memory = backbone.forward(params, CONFIG, rows, memory)
    return backbone.logits(params, CONFIG, out.hidden[:, -1]), memory


def memory_of(config: ModelConfig, sequences: int, format: str) -> PagedMemory:
    """A memory of two blocks per sequence."""
    made = create_paged(config, CacheConfig(), blocks=5, slots=3, format=format)
    tables = 1 + jnp.arange(2 * sequences, dtype=jnp.int32).reshape(sequences, 2)
    return bind(made, 1 + jnp.arange(sequences, dtype=jnp.int32), tables)


@pytest.mark.parametrize("format", ["values", "bytes"])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_step_exports(format: str, rows: int) -> None:
    params = abstract(model_parameters(CONFIG))
    memory = jax.eval_shape(lambda: memory_of(CONFIG, 2, format))
    leaves, tree = jax.tree.flatten(memory)

    def flat(params: Any, leaves: list[jax.Array], tokens: jax.Array, start: jax.Array) -> Any:
        logits, after = step(params, jax.tree.unflatten(tree, leaves), tokens, start)
        return logits, jax.tree.leaves(after)

    tokens = jax.ShapeDtypeStruct((2, rows), jnp.int32)
    start = jax.ShapeDtypeStruct((2,), jnp.int32)
    both = ("tpu", "cuda")
    made = jax.export.export(jax.jit(flat), platforms=both)(params, leaves, tokens, start)
    assert made.platforms == both
    assert made.out_avals[0].shape == (2, CONFIG.vocab_size)
    assert [(a.shape, a.dtype) for a in made.out_avals[1:]] == [(x.shape, x.dtype) for x in leaves]
