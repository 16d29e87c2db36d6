"""Compiled programs of a device: each shape is traced at its first use and never again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.plan import PlanRow, StepPlan


class Programs:
    """Jitted functions by name, their arguments in one place.

    All arrays are committed to `place`: a program is traced anew for arrays placed otherwise. From
    the second use of a shape on, a trace is an error (`jax.no_tracing`), and so is any transfer that
    is not written down here.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], place: Sharding) -> None:
        """Nothing is compiled yet."""
        self.programs, self.place = functions, place
        self.compiled: set[tuple[Any, ...]] = set()  # programs and shapes that were used

    def run(self, name: str, *arguments: Any) -> Any:
        """Queue a program; the last argument is the host's."""
        *held, batch = arguments
        leaves, tree = jax.tree.flatten(batch)
        key = (name, tree, *((x.shape, x.dtype) for x in leaves))
        if key not in self.compiled:
            self.compiled.add(key)
            return self.programs[name](*held, jax.device_put(batch, self.place))
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            return self.programs[name](*held, jax.device_put(batch, self.place))


def rehearsals(
    config: EngineConfig, buckets: Buckets, widths: tuple[int, ...]
) -> Iterator[StepPlan]:
    """A plan of each shape that an engine's steps may have; nobody's memory is named in them."""
    prompts = buckets.prompt if config.role != Role.COMPLETION else ()
    for width, blocks in itertools.product(prompts, buckets.blocks):
        row = PlanRow(-1, width, width, (0,) * width, (), (0,) * blocks, 0, last_chunk=False)
        yield StepPlan(-1, True, (row,))
    if config.role == Role.PROMPT:
        return
    first = config.role == Role.COMPLETION and config.cache.nextn > 0
    drafts = 0 if config.verification == "confidence" else None
    for count, blocks, q in itertools.product(buckets.sequences, buckets.blocks, widths):
        row = PlanRow(-1, q, q, (0,), (), (0,) * blocks, 0, draft_first=first)
        yield StepPlan(-1, False, (row,) * count, drafts=drafts)
