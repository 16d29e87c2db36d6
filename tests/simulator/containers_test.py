"""The loop's containers against Python's own: heapq, deque and lists."""

import collections
import heapq

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from deepinfer_jax.simulator import containers

CAPACITY = 24


def compiled(function):
    """`function` jitted with 64-bit types, taking and giving numpy arrays."""
    jitted = jax.jit(function)

    def call(*arguments):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, jitted(*arguments))

    return call


heap_push = compiled(containers.heap_push)
heap_pop = compiled(containers.heap_pop)
push_back = compiled(containers.push_back)
push_front = compiled(containers.push_front)
push_second = compiled(containers.push_second)
pop_front = compiled(containers.pop_front)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2**62), st.integers(0, 2**41)))),
    st.integers(1, 4),
)
def test_heap_is_a_heap(operations, moments):
    """`None` pops. Few distinct times, so that codes must decide."""
    times, codes = np.zeros(CAPACITY, np.int64), np.zeros(CAPACITY, np.int64)
    size, model = np.int32(0), []
    for operation in [*operations, *[None] * CAPACITY]:
        if operation is not None and len(model) < CAPACITY:
            time, code = operation[0] % moments, operation[1]
            times, codes, size = heap_push(
                times, codes, size, np.int64(time), np.int64(code), np.int32(0)
            )
            heapq.heappush(model, (time, code))
        elif operation is None and model:
            assert (int(times[0]), int(codes[0])) == heapq.heappop(model)
            times, codes, size = heap_pop(times, codes, size, np.int32(0))
        assert int(size) == len(model)
    assert not model


def test_heap_orders_floats_and_huge_times():
    moments = [3.5, 2.0**61, 0.25, 3.25]
    for kind, values in ((np.float64, moments), (np.int64, [2**62, 7, 2**62 - 1, 0])):
        times, codes, size = np.zeros(5, kind), np.zeros(5, np.int64), np.int32(0)
        for i, value in enumerate(values):
            times, codes, size = heap_push(
                times, codes, size, kind(value), np.int64(i), np.int32(0)
            )
        found = []
        while size:
            found.append(times[0].item())
            times, codes, size = heap_pop(times, codes, size, np.int32(0))
        assert found == sorted(values)


def walk(following, head, lane):
    members, at = [], int(head[lane])
    while at != len(following) - 1:
        members.append(at)
        at = int(following[at])
    return members


LANES, REQUESTS = 3, 9


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["back", "front", "second", "pop"]), st.integers(0, LANES - 1)),
        max_size=40,
    )
)
def test_lanes_are_queues(operations):
    """A request stands in one lane at a time, and comes back after it left."""
    following = np.full(REQUESTS + 1, REQUESTS, np.int32)
    head, tail = (np.full(LANES, REQUESTS, np.int32) for _ in range(2))
    model = [collections.deque() for _ in range(LANES)]
    outside = collections.deque(range(REQUESTS))
    for name, lane in operations:
        at, queue = np.int32(lane), model[lane]
        if name == "pop":
            if queue:
                head = pop_front(following, head, at)
                outside.append(queue.popleft())
        elif outside and (name != "second" or queue):
            request = outside.popleft()
            push = {"back": push_back, "front": push_front, "second": push_second}[name]
            following, head, tail = push(following, head, tail, at, np.int32(request))
            queue.insert({"back": len(queue), "front": 0, "second": 1}[name], request)
        for each in range(LANES):
            assert walk(following, head, each) == list(model[each])


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.integers(0, 3), st.integers(0, 4), st.integers(-9, 9))
def test_elements_and_rows(i, j, value):
    grid = np.arange(20).reshape(4, 5)
    assert int(containers.get(jnp.asarray(grid), i, j)) == grid[i, j]
    assert np.array_equal(containers.get(jnp.asarray(grid), i), grid[i])
    changed = grid.copy()
    changed[i, j] = value
    assert np.array_equal(containers.put(jnp.asarray(grid), value, i, j), changed)
    changed[i, j] = grid[i, j] + value
    assert np.array_equal(containers.add(jnp.asarray(grid), value, i, j), changed)
    changed = grid.copy()
    changed[i] = np.arange(5) * value
    assert np.array_equal(containers.put(jnp.asarray(grid), np.arange(5) * value, i), changed)
