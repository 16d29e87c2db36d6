"""The vision stage (E of E/P/D): images are encoded on machines of their own before a prompt is matched.

Nothing flows back: encoders never wait for the engines behind them, so the stage runs first and hands
over when each request is ready, which is when it arrives at the service. Meaning: `SEMANTICS.md` 14.
Letters: `Q` requests, `I` images, `G` = machines x GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.policy import vision
from deepinfer_jax.rules import require
from deepinfer_jax.simulator.queries import request_stream
from deepinfer_jax.simulator.traces import Trace, in_arrival_order

Array = Any
FEMTOSECONDS_PER_TICK = 10**6
_NONE = -1


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Encoder machines. Times in ticks (ns) or femtoseconds, as their names say."""

    machines: int
    gpus: int  # per machine
    image_ticks: int  # of any image
    patch_femtoseconds: int  # per patch
    square_femtoseconds: int = 0  # per pair of patches: attention inside an image
    token_patches: int = 9  # patches of an image per token of it: 3 x 3 in V4.1
    transfer_ticks: int = 0  # from the last image encoded until the prompt is ready
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("machines", "gpus", "token_patches"):
            value = getattr(self, name)
            require(value >= 1, f"encoders.{name} is {value}; give at least 1")
        for name in ("image_ticks", "patch_femtoseconds", "square_femtoseconds", "transfer_ticks"):
            value = getattr(self, name)
            require(value >= 0, f"encoders.{name} is {value}; give 0 or more")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """What became of images, in the order of their requests, and when requests were ready."""

    ready: Array  # [Q] ticks; the arrival where a request has no images
    start: Array  # [I] ticks
    finish: Array  # [I] ticks
    gpu: Array  # [I] machine * gpus + gpu
    busy: Array  # [G] ticks


def encode(trace: Trace, config: EncoderConfig) -> Encoded:
    """Every image of a trace through the encoders; numpy arrays, requests in order of arrival.

    Raises:
      ValueError: a trace without images, to which encoders would mean nothing.
    """
    ordered = in_arrival_order(trace)
    require(
        len(ordered.image_tokens) > 0,
        f"{trace.source} has no images, but the service has encoders; leave them out",
    )
    count = np.diff(ordered.image_offsets)
    owner = np.repeat(np.arange(len(ordered)), count)
    arrival = ordered.arrival[owner]
    patches = ordered.image_tokens * config.token_patches
    with jax.enable_x64(True):
        numbers = (arrival, patches, service_ticks(patches, config), np.uint64(config.seed))
        start, finish, gpu, busy = jax.tree.map(
            np.asarray, _stage(config.machines, config.gpus, *numbers)
        )
    ready = ordered.arrival.copy()
    np.maximum.at(ready, owner, finish + config.transfer_ticks)
    return Encoded(ready, start, finish, gpu, busy)


def service_ticks(patches: Array, config: EncoderConfig) -> Array:
    """Ticks that images of so many patches take, int64, rounded up to whole ticks."""
    patches = np.asarray(patches, np.int64)
    work = patches * config.patch_femtoseconds + patches**2 * config.square_femtoseconds
    return config.image_ticks + -(-work // FEMTOSECONDS_PER_TICK)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Queues:
    """FIFO queues as linked lists: an image knows the one behind it on its GPU."""

    head: Array  # [G] the oldest image not retired, or _NONE
    tail: Array  # [G]
    behind: Array  # [I]
    assigned: Array  # [G] patches of images not retired
    free: Array  # [G] ticks, when the GPU has done all it was given
    busy: Array  # [G] ticks
    finish: Array  # [I] ticks


def _stage_of(
    machines: int, gpus: int, arrival: Array, patches: Array, ticks: Array, seed: Array
) -> tuple[Array, Array, Array, Array]:
    """(start [I], finish [I], GPU [I], busy [G]) of images in order of arrival."""
    images, everywhere = len(arrival), jnp.ones((machines, gpus), bool)
    none = jnp.full(machines * gpus, _NONE)
    zero = jnp.zeros(machines * gpus, jnp.int64)
    begin = _Queues(
        none, none, jnp.full(images, _NONE), zero, zero, zero, jnp.zeros(images, jnp.int64)
    )

    def step(queues: _Queues, i: Array) -> tuple[_Queues, tuple[Array, Array, Array]]:
        now = arrival[i]
        queues = _retired(queues, now, patches)
        draw = (request_stream(seed, i) >> 33).astype(jnp.int64)
        load = queues.assigned.reshape(machines, gpus)
        gpu = vision.choose(everywhere, load, draw)
        start = jnp.maximum(now, queues.free[gpu])
        queues = _joined(queues, i, gpu, patches[i], start, ticks[i])
        return queues, (start, start + ticks[i], gpu)

    last, made = lax.scan(step, begin, jnp.arange(images))
    return *made, last.busy


_stage = jax.jit(_stage_of, static_argnums=(0, 1))


def _retired(queues: _Queues, now: Array, patches: Array) -> _Queues:
    """The queues without images that are finished at `now`."""

    def done(q: _Queues) -> Array:
        return (q.head != _NONE) & (q.finish[q.head] <= now)

    def drop(q: _Queues) -> _Queues:
        gone = done(q)
        head = jnp.where(gone, q.behind[q.head], q.head)
        assigned = q.assigned - jnp.where(gone, patches[q.head], 0)
        return dataclasses.replace(q, head=head, assigned=assigned)

    return lax.while_loop(lambda q: jnp.any(done(q)), drop, queues)


def _joined(
    queues: _Queues, image: Array, gpu: Array, patches: Array, start: Array, ticks: Array
) -> _Queues:
    """An image at the end of a GPU's queue."""
    empty, last = queues.head[gpu] == _NONE, queues.tail[gpu]
    return _Queues(
        head=queues.head.at[gpu].set(jnp.where(empty, image, queues.head[gpu])),
        tail=queues.tail.at[gpu].set(image),
        behind=queues.behind.at[jnp.where(empty, len(queues.behind), last)].set(image, mode="drop"),
        assigned=queues.assigned.at[gpu].add(patches),
        free=queues.free.at[gpu].set(start + ticks),
        busy=queues.busy.at[gpu].add(ticks),
        finish=queues.finish.at[image].set(start + ticks),
    )


def behind_encoders(trace: Trace, encoded: Encoded) -> Trace:
    """The trace as the service sees it: requests arrive when their images are encoded."""
    ordered = in_arrival_order(trace)
    return in_arrival_order(dataclasses.replace(ordered, arrival=encoded.ready))
