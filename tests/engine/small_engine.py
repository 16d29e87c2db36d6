"""A model of four layers that compiles in seconds, and engines over it. Every mechanism is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.loops import Engine, land
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Leaf, is_leaf

BUCKETS = Buckets(sequences=(4,), prompt=(32,), blocks=(8,), prompts=2)


def micro() -> ModelConfig:
    """The tiny preset with one layer of each kind: window, ratio 2, ratio 1 and a second selection."""
    tiny = presets.tiny()
    assert tiny.engram is not None and tiny.draft is not None
    return dataclasses.replace(
        tiny,
        vocab_size=300,
        num_layers=4,
        compress_ratios=(0, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        hc_sinkhorn_iterations=3,
        num_experts=4,
        engram=dataclasses.replace(tiny.engram, layer_ids=(1,), num_embeddings=(462,)),
        draft=dataclasses.replace(tiny.draft, num_layers=1, target_layer_ids=(2, 3), num_experts=2),
    )


def parameters(model: ModelConfig) -> dict[str, Any]:
    """Random weights, drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(7)

    def draw(leaf: Leaf) -> jax.Array:
        if leaf.init != "normal":
            return jnp.asarray(np.full(leaf.shape, float(leaf.init == "ones"), np.float32))
        scale = (leaf.fan_in or leaf.shape[-1]) ** -0.5
        return jnp.asarray(rng.normal(0, scale, leaf.shape).astype(np.float32))

    params = jax.tree.map(draw, model_parameters(model), is_leaf=is_leaf)
    params["head"] = params["head"] * 4  # margins between ids are then wide
    return params


def config(**changes: Any) -> EngineConfig:
    """A small engine; `changes` to its fields or to those of its cache."""
    names = {field.name for field in dataclasses.fields(CacheConfig)}
    cache = {name: changes.pop(name) for name in names & set(changes)}
    fields = {
        "cache": CacheConfig(**{"block_tokens": 16, "nextn": 3, **cache}),
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_blocks": 40,
        "chunked_prefill": True,
        "prefill_interval": 2,
        "prefill_any_interval": 3,
        **changes,
    }
    return EngineConfig(**fields)


def prompts(count: int, seed: int, longest: int = 30) -> list[list[int]]:
    """Random ids of the micro model."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, count)
    return [rng.integers(3, 300, size).tolist() for size in sizes]


def requests(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], first: int = 0
) -> list[Request]:
    """One request per prompt, number i seeded with i."""
    return [
        Request(
            first + i,
            prompt,
            max_tokens=wish.max_tokens,
            stop_ids=frozenset((*(() if wish.ignore_eos else (1,)), *wish.stop_ids)),
            sampling=Answer(wish, wish.seed if wish.seed is not None else i),
        )
        for i, (prompt, wish) in enumerate(zip(prompts, params, strict=True))
    ]


def engine(device: Device, **changes: Any) -> Engine:
    """A new scheduler over a device, whose configuration may differ where shapes do not."""
    made = dataclasses.replace(device.config, **changes)
    return Engine(Scheduler(made, device.model.vocab_size, lookback=reach(device.model)), device)


def serve(
    engine: Engine,
    asked: Iterable[Request],
    between: Callable[[int], None] = lambda call: None,
) -> dict[int, Any]:
    """Run all requests to their end; tokens by request. `between` is called before each call."""
    asked = list(asked)
    for request in asked:
        engine.scheduler.add(request)
    call = 0
    while engine.scheduler.unfinished:
        between(call)
        engine.call()
        engine.scheduler.check_integrity()
        call += 1
        assert call < 2000, "the engine does not come to an end"
    land(engine)
    storage = engine.scheduler.roster.storage
    used = (storage.blocks.used_count, storage.slots.used_count, storage.draft_slots.used_count)
    assert used == (0, 0, 0), f"{used} of blocks, slots and draft slots are still owned"
    return {r.request_id: r.tokens[r.prompt_length :] for r in asked}
