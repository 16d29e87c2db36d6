"""What is planned: a topology's devices as a mesh, a model, an engine of one size on each rank."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.cost import hardware
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.planned import PlannedDevice
from deepinfer_jax.layout import blocks_needed
from deepinfer_jax.parallel.mesh import make_mesh

GENERATIONS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices that are not here. On tpu7x a chip is two of them."""

    topology: str
    devices: tuple[Any, ...]
    hbm_bytes: float  # of a device


def target(topology: str) -> Target:
    """The devices of a TPU topology, "v5p:4x4x4", as libtpu describes them.

    Raises:
      ValueError: no such generation or shape, or no libtpu.
    """
    generation, _, shape = topology.partition(":")
    if generation not in GENERATIONS or not shape.replace("x", "").isdigit():
        raise ValueError(
            f"--topology={topology}: give a generation ({', '.join(GENERATIONS)}) and a shape of "
            "chips, such as v5p:4x4x4 or v6e:8x8"
        )
    # libtpu must neither look for its own chips nor mind another compiler on this machine
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu is absent, or refuses the shape: it has no type of its own
        raise ValueError(
            f"--topology={topology} is not to be had: {str(error).splitlines()[0]} (the compiler "
            "comes with: pip install libtpu)"
        ) from error
    chips = math.prod(int(side) for side in shape.split("x"))
    memory = hardware.lookup(GENERATIONS[generation]).hbm_bytes * chips / len(found.devices)
    return Target(topology, tuple(found.devices), memory)


def model_of(settings: dict[str, Any]) -> ModelConfig:
    """The preset without its image encoder, for the engine takes no images; short, if asked."""
    model: ModelConfig = getattr(presets, settings["model"])()
    model = dataclasses.replace(model, vision=None)
    return shortened(model) if settings["short"] else model


def shortened(model: ModelConfig) -> ModelConfig:
    """Four layers in place of all: window only, ratio 2, ratio 1, and a second selection."""
    assert model.engram is not None and model.draft is not None
    stages = model.draft.num_layers
    return dataclasses.replace(
        model,
        num_layers=4,
        compress_ratios=(0, 2, 1, 1, *(0,) * stages),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram=dataclasses.replace(
            model.engram, layer_ids=(1,), num_embeddings=model.engram.num_embeddings[:1]
        ),
        draft=dataclasses.replace(model.draft, target_layer_ids=(1, 2, 3)),
    )


def engine_of(settings: dict[str, Any]) -> tuple[EngineConfig, Buckets]:
    """A rank's engine, with blocks for every seat at full length, and one bucket of each kind."""
    cache = CacheConfig(nextn=settings["drafts"])
    seats, context, prompt = settings["batch"], settings["context"], settings["prompt"]
    config = EngineConfig(
        cache=cache,
        max_model_len=context,
        max_num_seqs=seats,
        max_num_batched_tokens=max(prompt, seats * (cache.nextn + 1)),
        chunked_prefill=True,
        num_blocks=1 + seats * blocks_needed(context + 4 * (cache.nextn + 1), cache),
    )
    widest = blocks_needed(config.runtime_max_len, cache)
    sizes = Buckets(
        sequences=(seats,),
        prompt=tuple(sorted({prompt, min(config.batched_tokens, context)})),
        blocks=(widest,),
    )
    return config, sizes


def planned(
    settings: dict[str, Any], devices: tuple[Any, ...], whole: bool = False
) -> PlannedDevice:
    """The engine on all devices: each a rank with its own requests, the experts over all.

    `whole` is the model with all its layers, whatever the settings say.
    """
    mesh: Mesh = make_mesh(1, len(devices), devices=devices)
    config, sizes = engine_of(settings)
    return PlannedDevice(
        model_of({**settings, "short": settings["short"] and not whole}),
        config,
        mesh,
        buckets=sizes,
        format=settings["format"],
        extra_experts=settings["extra_experts"],
        ragged=settings["ragged"],
    )
