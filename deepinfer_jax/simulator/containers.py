"""Fixed-size containers inside the loop's carry: element access, FIFO lanes of linked requests, a binary heap.

All updates are single-element writes, so XLA keeps them in place. `size` of the linked array is the
"nobody" sentinel (never -1, which would wrap around).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from deepinfer_jax.simulator.inplace import while_loop

Array = Any


def get(array: Array, *index: Array) -> Array:
    """`array[index]` for scalar indices known to be in bounds; fewer indices than axes give a row."""
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)
    rest = array.shape[len(index) :]
    starts = index + (jnp.int32(0),) * len(rest)
    sizes = (1,) * len(index) + rest
    block = lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
    return block.reshape(rest)


def put(array: Array, value: Array, *index: Array) -> Array:
    """`array` with `value` at scalar indices known to be in bounds."""
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)
    rest = array.shape[len(index) :]
    block = jnp.asarray(value, array.dtype).reshape((1,) * len(index) + rest)
    starts = index + (jnp.int32(0),) * len(rest)
    return lax.dynamic_update_slice(array, block, starts, allow_negative_indices=False)


def add(array: Array, value: Array, *index: Array) -> Array:
    """`array` with `value` added at scalar indices known to be in bounds."""
    return put(array, get(array, *index) + value, *index)


# FIFO lanes. `following[request]` links requests; a request stands in at most one lane.


def push_back(
    following: Array, head: Array, tail: Array, lane: Array, request: Array
) -> tuple[Array, Array, Array]:
    """Appends `request` to `lane`; returns (following, head, tail)."""
    nobody = following.shape[0] - 1
    last = get(tail, lane)
    empty = get(head, lane) == nobody
    following = put(following, nobody, request)
    following = put(following, jnp.where(empty, nobody, request), jnp.where(empty, nobody, last))
    head = put(head, jnp.where(empty, request, get(head, lane)), lane)
    return following, head, put(tail, request, lane)


def push_front(
    following: Array, head: Array, tail: Array, lane: Array, request: Array
) -> tuple[Array, Array, Array]:
    """Puts `request` before everybody in `lane`; returns (following, head, tail)."""
    nobody = following.shape[0] - 1
    first = get(head, lane)
    following = put(following, first, request)
    tail = put(tail, jnp.where(first == nobody, request, get(tail, lane)), lane)
    return following, put(head, request, lane), tail


def push_second(
    following: Array, head: Array, tail: Array, lane: Array, request: Array
) -> tuple[Array, Array, Array]:
    """Puts `request` right behind the head of a lane that is not empty; returns (following, head, tail)."""
    first = get(head, lane)
    last = get(tail, lane)
    following = put(following, get(following, first), request)
    following = put(following, request, first)
    return following, head, put(tail, jnp.where(last == first, request, last), lane)


def pop_front(following: Array, head: Array, lane: Array) -> Array:
    """`head` without the first request of a lane that is not empty."""
    return put(head, get(following, get(head, lane)), lane)


# Binary min-heap of (time, code). Code orders what happens at one time.


def heap_push(
    times: Array, codes: Array, size: Array, time: Array, code: Array, zero: Array
) -> tuple[Array, Array, Array]:
    """Inserts (time, code); returns (times, codes, size)."""
    time = jnp.asarray(time, times.dtype)

    def rises(carry: tuple[Array, Array, Array]) -> Array:
        times, codes, at = carry
        parent = (at - 1) // 2
        above = get(times, parent)
        return (at > 0) & ((time < above) | ((time == above) & (code < get(codes, parent))))

    def rise(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        times, codes, at = carry
        parent = (at - 1) // 2
        times = put(times, get(times, parent), at)
        codes = put(codes, get(codes, parent), at)
        return times, codes, parent

    times, codes, at = while_loop(rises, rise, (times, codes, size), zero)
    return put(times, time, at), put(codes, code, at), size + 1


def heap_pop(times: Array, codes: Array, size: Array, zero: Array) -> tuple[Array, Array, Array]:
    """Removes the smallest of a heap that is not empty; read it at index 0 first."""
    size = size - 1
    time, code = get(times, size), get(codes, size)
    limit = times.shape[0] - 1

    def smaller_child(times: Array, codes: Array, at: Array) -> Array:
        left = jnp.minimum(2 * at + 1, limit)
        right = jnp.minimum(2 * at + 2, limit)
        lower = (get(times, right) < get(times, left)) | (
            (get(times, right) == get(times, left)) & (get(codes, right) < get(codes, left))
        )
        return jnp.where((2 * at + 2 < size) & lower, right, left)

    def sinks(carry: tuple[Array, Array, Array]) -> Array:
        times, codes, at = carry
        child = smaller_child(times, codes, at)
        below = get(times, child)
        return (2 * at + 1 < size) & (
            (below < time) | ((below == time) & (get(codes, child) < code))
        )

    def sink(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        times, codes, at = carry
        child = smaller_child(times, codes, at)
        times = put(times, get(times, child), at)
        codes = put(codes, get(codes, child), at)
        return times, codes, child

    times, codes, at = while_loop(sinks, sink, (times, codes, jnp.zeros_like(size)), zero)
    return put(times, time, at), put(codes, code, at), size
