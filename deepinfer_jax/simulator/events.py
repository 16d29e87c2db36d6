"""Timed events of requests on the heap: their kinds, their order inside a tick, and scheduling them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.containers import get, heap_push
from deepinfer_jax.simulator.inplace import when, while_loop
from deepinfer_jax.simulator.state import State

Array = Any

FETCH, HANDOFF, WRITE_BACK, REMATCH = 0, 1, 2, 3
"""REMATCH belongs to phase 4, the others to phase 1."""

PHASE_BIT = 40


def event_code(request: Array, kind: int) -> Array:
    """Heap code that orders the events of one tick by (phase, request, kind)."""
    late = 1 if kind == REMATCH else 0
    return (late << PHASE_BIT) + jnp.asarray(request, jnp.int64) * 4 + kind


def kind_and_request(code: Array) -> tuple[Array, Array]:
    """Inverse of `event_code`."""
    request = (code & ((1 << PHASE_BIT) - 1)) >> 2
    return (code & 3).astype(jnp.int32), request.astype(jnp.int32)


def schedule(c: Cluster, state: State, time: Array, request: Array, kind: int) -> State:
    """Puts a timed event of `request` on the heap."""
    times, codes, size = heap_push(
        state.heap_time, state.heap_code, state.heap_size, time, event_code(request, kind), c.zero
    )
    return state.replace(heap_time=times, heap_code=codes, heap_size=size)


def call_off(c: Cluster, state: State, requests: Array) -> State:
    """Removes the fetches and hand-offs of `requests` (bool [Q + 1]) from the heap.

    The entries that stay are pushed again one by one: the heap that grows at the array's start never
    passes the entry that is read.
    """

    def keep(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        times, codes, size, count = carry
        time, code = get(times, i), get(codes, i)
        kind, request = kind_and_request(code)
        gone = get(requests, request) & ((kind == FETCH) | (kind == HANDOFF))

        def push(heap: tuple[Array, ...]) -> tuple[Array, ...]:
            return heap_push(heap[0], heap[1], heap[2], time, code, c.zero)

        return (*when(~gone, push, (times, codes, size), c.zero), count)

    carry = (state.heap_time, state.heap_code, jnp.int32(0), state.heap_size)
    _, (times, codes, size, _) = while_loop(
        lambda x: x[0] < x[1][3],
        lambda x: (x[0] + 1, keep(x[0], x[1])),
        (jnp.int32(0), carry),
        c.zero,
    )
    return state.replace(heap_time=times, heap_code=codes, heap_size=size)
