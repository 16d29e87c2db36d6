"""A trained model on disk: the weights as `checkpoint.native` keeps them, the tokenizer beside."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from deepinfer_jax.checkpoint import native
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import abstract
from deepinfer_jax.report import records

WEIGHTS, WORDS, DIGESTS = "weights", "tokenizer.json", "sha256.json"


def save(directory: pathlib.Path, params: Any, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Weights in the dtypes of service, bfloat16 but for what the release keeps in float32."""
    like = abstract(model_parameters(config), jnp.bfloat16)
    rounded = jax.tree.map(lambda x, leaf: jnp.asarray(x).astype(leaf.dtype), params, like)
    native.save(directory / WEIGHTS, rounded, config)
    with records.atomic(directory / WORDS) as file:
        file.write(tokenizer.to_str().encode())
    records.write_json(directory / DIGESTS, _digests(directory))


def load(directory: pathlib.Path, config: ModelConfig) -> tuple[Any, Tokenizer]:
    """Weights, all float32 as this machine computes, and the tokenizer.

    Raises:
      ValueError: nothing was saved there, a file is not as it was saved, or it is another model's.
    """
    parts = (directory / WEIGHTS, directory / WORDS, directory / DIGESTS)
    if missing := [path.name for path in parts if not path.exists()]:
        raise ValueError(
            f"{directory} holds no checkpoint ({', '.join(missing)} missing); give a directory "
            "that experiments.train_tiny wrote"
        )
    _check(directory)
    params, found = native.restore(directory / WEIGHTS)
    if found != config:
        raise ValueError(
            f"{directory} holds another model than the one asked for; choose the preset it was "
            "trained as"
        )
    tokenizer = Tokenizer.from_file(str(directory / WORDS))
    return jax.tree.map(lambda x: x.astype(jnp.float32), params), tokenizer


def _digests(directory: pathlib.Path) -> dict[str, str]:
    """SHA-256 of the tokenizer and of every file of the weights, by path."""
    files = [directory / WORDS, *(p for p in (directory / WEIGHTS).rglob("*") if p.is_file())]
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def _check(directory: pathlib.Path) -> None:
    try:
        kept = json.loads((directory / DIGESTS).read_text())
    except ValueError as error:
        raise ValueError(f"{directory / DIGESTS} is damaged; copy the checkpoint again") from error
    found = _digests(directory)
    if wrong := sorted(name for name in kept if found.get(name) != kept[name]):
        raise ValueError(
            f"{directory} is damaged: {len(wrong)} files are absent or changed, first {wrong[0]}; "
            "copy the checkpoint again"
        )
