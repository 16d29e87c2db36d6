"""Fixed-size containers inside the loop's carry: element access, FIFO lanes of linked requests, a binary heap.

All updates are single-element writes, so XLA keeps them in place. `size` of the linked array is the
"nobody" sentinel (never -1, which would wrap around).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

Array = Any

GUARD = 64
"""Arrays of fewer elements may be copied: that costs less than a write."""


def get(array: Array, *index: Array) -> Array:
    """`array[index]` for scalar indices known to be in bounds; fewer indices than axes give a row."""
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)
    rest = array.shape[len(index) :]
    starts = index + (jnp.int32(0),) * len(rest)
    block = lax.dynamic_slice(array, starts, (1,) * len(index) + rest)
    return block.reshape(rest)


def put(array: Array, value: Array, *index: Array) -> Array:
    """`array` with `value` at scalar indices known to be in bounds."""
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)
    rest = array.shape[len(index) :]
    block = jnp.asarray(value, array.dtype).reshape((1,) * len(index) + rest)
    return lax.dynamic_update_slice(array, block, index + (jnp.int32(0),) * len(rest))


def add(array: Array, value: Array, *index: Array) -> Array:
    """`array` with `value` added at scalar indices known to be in bounds."""
    return put(array, get(array, *index) + value, *index)


def _traced(function: Callable[..., Any], leaves: list[Any]) -> tuple[Callable[..., Any], set[int], set[int]]:
    """(`function` traced once, positions of flat arguments it reads, and of those it returns as they are)."""
    closed = jax.make_jaxpr(function)(*leaves)
    inputs = {id(variable): i for i, variable in enumerate(closed.jaxpr.invars)}
    read = {inputs[id(v)] for e in closed.jaxpr.eqns for v in e.invars if id(v) in inputs}
    same = {i for i, (x, y) in enumerate(zip(closed.jaxpr.invars, closed.jaxpr.outvars, strict=False)) if x is y}
    return jaxpr_as_fun(closed), read, same


def while_loop(
    condition: Callable[[Any], Array], body: Callable[[Any], Any], init: Any, zero: Array
) -> Any:
    """`lax.while_loop` that XLA:CPU runs without copying its carry.

    XLA copies an array that a nested loop only reads when something outside writes it. Writing the
    array's last element onto itself keeps the array in the loop's carry, so that it stays in place.

    Args:
      zero: an integer 0 that the compiler cannot know to be 0; otherwise it removes those writes.
    """
    leaves, tree = jax.tree.flatten(init)
    leaves = [jnp.asarray(x) for x in leaves]
    step, read, same = _traced(lambda *x: jax.tree.leaves(body(jax.tree.unflatten(tree, x))), leaves)
    ask, asked, _ = _traced(lambda *x: [condition(jax.tree.unflatten(tree, x))], leaves)
    guarded = [i for i in same & (read | asked) if leaves[i].ndim and leaves[i].size >= GUARD]

    def guarded_step(carry: list[Any]) -> list[Any]:
        carry = list(step(*carry))
        for i in guarded:
            last = tuple(n - 1 for n in carry[i].shape)
            value = get(carry[i], *last)
            value = value ^ (zero != 0) if value.dtype == bool else value + zero.astype(value.dtype)
            carry[i] = put(carry[i], value, *last)
        return carry

    done = lax.while_loop(lambda carry: ask(*carry)[0], guarded_step, leaves)
    return jax.tree.unflatten(tree, done)


def when(predicate: Array, then: Callable[[Any], Any], state: Any, zero: Array) -> Any:
    """`then(state)` where `predicate` holds, else `state`.

    A loop of at most one turn: XLA:CPU copies what a conditional passes through, but not a loop's carry.
    """
    once = (jnp.asarray(predicate, bool), state)
    return while_loop(lambda x: x[0], lambda x: (jnp.asarray(False), then(x[1])), once, zero)[1]


def either(
    predicate: Array,
    then: Callable[[Any], Any],
    otherwise: Callable[[Any], Any],
    state: Any,
    zero: Array,
) -> Any:
    """`then(state)` where `predicate` holds, else `otherwise(state)`; see `when`."""
    return when(~predicate, otherwise, when(predicate, then, state, zero), zero)


def fori_loop(upper: int, body: Callable[[Array, Any], Any], init: Any, zero: Array) -> Any:
    """`lax.fori_loop` from 0 with the same care for its carry."""
    _, result = while_loop(
        lambda carry: carry[0] < upper,
        lambda carry: (carry[0] + 1, body(*carry)),
        (jnp.int32(0), init),
        zero,
    )
    return result


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


def heap_pop(
    times: Array, codes: Array, size: Array, zero: Array
) -> tuple[Array, Array, Array]:
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
