"""Compiled programs of a device: each shape is traced at its first use and never again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.flat import Layout, flatten
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.plan import PlanRow, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.parallel.mesh import put
from deepinfer_jax.policy.prefix import Image


class Programs:
    """Jitted functions by name, their arguments in one place.

    All arrays are committed to `place`: a program is traced anew for arrays placed otherwise. From
    the second use of a shape on, a trace is an error (`jax.no_tracing`), and so is any transfer that
    is not written down here: one array a program.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], place: Sharding) -> None:
        """Nothing is compiled yet. Functions as of `program`."""
        self.programs, self.place = functions, place
        self.compiled: set[tuple[str, Layout]] = set()  # programs and shapes that were used

    def run(self, name: str, *arguments: Any) -> Any:
        """Queue a program; the last argument is the host's."""
        *held, batch = arguments
        flat, layout = flatten(batch)
        return self.queue(name, layout, *held, flat)

    def queue(self, name: str, layout: Layout, *arguments: Any) -> Any:
        """Queue a program whose last argument is flat already."""
        *held, flat = arguments
        batch = put(flat, self.place)
        if (name, layout) not in self.compiled:
            self.compiled.add((name, layout))
            return self.programs[name](layout, *held, batch)
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            return self.programs[name](layout, *held, batch)


def program(function: Callable[..., Any], donate: int | None = None, **options: Any) -> Any:
    """A function (*held, batch) jitted as one of (layout, *held, flat).

    Args:
      donate: which of the held arguments may be overwritten.
      options: of `jax.jit`.
    """

    def named(layout: Layout, *arguments: Any) -> Any:
        *held, flat = arguments
        return function(*held, layout.restored(flat))

    named.__name__ = getattr(function, "__name__", "program")
    donated = () if donate is None else (1 + donate,)
    return jax.jit(named, static_argnums=0, donate_argnums=donated, **options)


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


def illustrated(plan: StepPlan, hidden: int) -> tuple[StepPlan, list[Request]]:
    """A rehearsed prompt step, as one whose chunks begin with an image, and its requests."""
    greedy = Answer(SamplingParams(temperature=0.0), seed=0)
    image, vectors = Image(0, 1, b""), np.zeros((1, hidden), np.float32)
    rows = tuple(dataclasses.replace(row, images=(image,)) for row in plan.rows)
    requests = [
        Request(-1, [0], sampling=greedy, images=(image,), pictures=(vectors,)) for _ in rows
    ]
    return dataclasses.replace(plan, rows=rows), requests
