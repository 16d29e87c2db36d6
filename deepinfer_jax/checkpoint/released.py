"""The released DeepSeek-V4.1 layout: reading it into the model's tree, and writing it.

Stored numbers are FP8 in 32 x 32 squares (dense matrices), FP4 in rows (routed experts), FP8 in
rows (Engram tables), bfloat16 or float32; reading gives plain numbers. `names` says which is which.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from deepinfer_jax.checkpoint import elements, names, shards
from deepinfer_jax.checkpoint.coverage import find
from deepinfer_jax.checkpoint.names import GROUP, Kind, Part, Tensor, Weight
from deepinfer_jax.checkpoint.released_config import released_config, write_released_config
from deepinfer_jax.checkpoint.tree import check_tree
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.parameters import Tree

_CHUNK = 1 << 24  # numbers decoded at a time
_SHARD_BYTES = 4 << 30


def read_released(
    directory: str | os.PathLike[str],
    config: ModelConfig | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    shardings: Tree | None = None,
) -> Tree:
    """The parameters in a released checkpoint, one weight at a time.

    Args:
      directory: `model.safetensors.index.json`, its shards and, without `config`, `config.json`.
      dtype: of every weight but those declared float32.
      shardings: a tree like the parameters'; each weight is placed as soon as it is complete. The
        host then holds one weight (the largest: an Engram table) and a chunk; without, all of them.

    Returns:
      `model_parameters(config)`'s tree, of jax arrays with `shardings`, of numpy arrays without.

    Raises:
      ValueError: see `coverage.find` and `released_config`; nothing has been read then.
    """
    directory = Path(directory)
    tree = names.weights(config or released_config(directory))
    weights, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Weight))
    entries = find(directory, weights)
    places = jax.tree.leaves(shardings) if shardings is not None else [None] * len(weights)
    leaves = []
    for weight, place in zip(weights, places, strict=True):
        value = _read(weight, entries, dtype)
        leaves.append(
            value if place is None else jax.block_until_ready(jax.device_put(value, place))
        )
    return jax.tree.unflatten(structure, leaves)


def _read(weight: Weight, entries: dict[str, shards.Entry], dtype: DTypeLike) -> np.ndarray:
    leaf = weight.leaf
    out = np.empty(leaf.shape, leaf.dtype or dtype)
    width = weight.parts[0].shape[-1]
    rows = out.reshape(-1, width) if len(weight.parts[0].shape) > 1 else out
    at = 0
    for part in weight.parts:
        for first, count in _chunks(part):
            rows[at : at + count] = _read_rows(part, entries, first, count)
            at += count
    assert at == len(rows), weight.path
    return out


def _chunks(part: Part) -> Iterator[tuple[int, int]]:
    """(first row, rows) of at most `_CHUNK` numbers, each starting at the first row of a square."""
    rows = part.shape[0]
    step = max(_CHUNK // math.prod(part.shape[1:]) // GROUP, 1) * GROUP
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _read_rows(part: Part, entries: dict[str, shards.Entry], first: int, count: int) -> np.ndarray:
    values, *scales = (entries[tensor.name] for tensor in part.tensors)
    raw = shards.read_rows(values, first, count)
    if not scales:
        return raw
    tall = GROUP if part.kind is Kind.FP8_SQUARES else 1
    factors = shards.read_rows(scales[0], first // tall, -(-count // tall))
    return elements.decode(part.kind, raw, factors)


def write_released(
    params: Tree,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Quantise and write parameters as a released checkpoint: shards, index and config.json.

    The directory appears complete or not at all. A shard is cut before it exceeds `shard_bytes`,
    between weights and never between numbers and their scales.

    Raises:
      ValueError: the directory exists; the tree is not this model's; a weight is not finite.
    """
    directory = Path(directory).absolute()
    if directory.exists():
        raise ValueError(f"{directory} exists and is not overwritten; remove it or choose another")
    check_tree(params, config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write_shards(params, config, made, shard_bytes)
        write_released_config(config, made)
        made.chmod(0o755)
        os.rename(made, directory)
    except BaseException:
        shutil.rmtree(made)
        raise


def _write_shards(params: Tree, config: ModelConfig, made: Path, shard_bytes: int) -> None:
    weights = names.flat(config)
    plan = _plan([part for weight in weights for part in weight.parts], shard_bytes)
    arrays = _arrays(params, weights)
    places: dict[str, str] = {}
    for i, tensors in enumerate(plan, 1):
        file = f"model-{i:05}-of-{len(plan):05}.safetensors"
        shards.write_shard(made / file, tensors, itertools.islice(arrays, len(tensors)))
        places |= {tensor.name: file for tensor in tensors}
    total = sum(tensor.bytes for tensors in plan for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (made / shards.INDEX).write_text(json.dumps(index, indent=1))


def _plan(parts: list[Part], shard_bytes: int) -> list[list[Tensor]]:
    plan: list[list[Tensor]] = [[]]
    filled = 0
    for part in parts:
        size = sum(tensor.bytes for tensor in part.tensors)
        if plan[-1] and filled + size > shard_bytes:
            plan.append([])
            filled = 0
        plan[-1] += part.tensors
        filled += size
    return plan


def _arrays(params: Tree, weights: list[Weight]) -> Iterator[np.ndarray]:
    """Every stored array, in the order of the plan; one weight is on the host at a time."""
    for leaf, weight in zip(jax.tree.leaves(params), weights, strict=True):
        whole = np.asarray(leaf)
        at = 0
        for part in weight.parts:
            if len(part.shape) == 1:
                yield from elements.encode(part, whole)
                continue
            rows = whole.reshape(-1, part.shape[-1])[at : at + part.shape[0]]
            at += part.shape[0]
            yield from elements.encode(part, rows)
