"""A trained model on disk: weights by Orbax, the tokenizer beside them."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import abstract


def save(directory: pathlib.Path, params: Any, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Weights in the dtypes of service, bfloat16 but for what the release keeps in float32."""
    like = abstract(model_parameters(config), jnp.bfloat16)
    rounded = jax.tree.map(lambda x, leaf: jnp.asarray(x).astype(leaf.dtype), params, like)
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.resolve() / "weights", rounded, force=True)
    tokenizer.save(str(directory / "tokenizer.json"))


def load(directory: pathlib.Path, config: ModelConfig) -> tuple[Any, Tokenizer]:
    """Weights, all float32 as this machine computes, and the tokenizer.

    Raises:
      ValueError: nothing was saved there.
    """
    weights, words = directory / "weights", directory / "tokenizer.json"
    if not weights.is_dir() or not words.is_file():
        raise ValueError(
            f"{directory} holds no checkpoint (weights/, tokenizer.json); give one that `save` wrote"
        )
    like = abstract(model_parameters(config), jnp.bfloat16)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(weights.resolve(), like)
    return jax.tree.map(lambda x: x.astype(jnp.float32), found), Tokenizer.from_file(str(words))
