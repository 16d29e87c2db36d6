"""Loops and branches that stay in place compute what Python computes, and do stay in place."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from deepinfer_jax.simulator import inplace
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.containers import get, put
from deepinfer_jax.simulator.simulate import prepare
from tests.simulator.oracle.hand import cost, workload

SIZE = 70  # large enough to be kept in place
ARRAYS = ("long", "other", "flags", "small")
index = st.integers(0, SIZE - 1)
array = st.sampled_from(ARRAYS)

simple = st.one_of(
    st.tuples(st.just("write"), array, index, st.integers(-3, 3)),
    st.tuples(st.just("move"), array, index, array, index),
    st.tuples(st.just("read"), array, index),
    st.tuples(st.just("sum"), array),
    st.tuples(st.just("chase"), array, array),
    st.tuples(st.just("swap"), array, array),
)
programs = st.recursive(
    st.lists(simple, min_size=1, max_size=4),
    lambda block: st.lists(
        st.one_of(
            simple,
            st.tuples(st.just("when"), st.integers(2, 3), block),
            st.tuples(st.just("either"), st.integers(2, 3), block, block),
            st.tuples(st.just("repeat"), st.integers(0, 3), block),
            st.tuples(st.just("until"), st.integers(0, 4), block),
        ),
        min_size=1,
        max_size=4,
    ),
    max_leaves=5,
)


def sizes(name):
    return 5 if name == "small" else SIZE


def start():
    state = {name: np.arange(sizes(name)) * 7 % 11 for name in ARRAYS}
    state["flags"] = state["flags"] % 2 == 0
    return state | {"seen": 1, "count": 0}


def as_kind(name, value):
    return value % 2 == 1 if name == "flags" else value


def in_python(program, s):
    """Runs `program` on numpy arrays, in place."""
    for operation, *given in program:
        if operation == "write":
            name, at, value = given
            s[name][at % sizes(name)] = as_kind(name, value + s["seen"])
        elif operation == "move":
            name, at, source, there = given
            value = int(s[source][there % sizes(source)])
            s[name][at % sizes(name)] = as_kind(name, value)
        elif operation == "read":
            s["seen"] = (s["seen"] + int(s[given[0]][given[1] % sizes(given[0])])) % 1000
        elif operation == "sum":
            s["seen"] = int(s[given[0]].sum()) % 1000
        elif operation == "chase":  # a read decides where the write goes
            name, source = given
            at = abs(int(s[source][s["seen"] % sizes(source)])) % sizes(name)
            s[name][at] = as_kind(name, s["seen"] % 13)
        elif operation == "swap" and sizes(given[0]) == sizes(given[1]):
            one, two = given
            if s[one].dtype == s[two].dtype:
                s[one], s[two] = s[two].copy(), s[one].copy()
        elif operation == "when" and s["seen"] % given[0] == 0:
            in_python(given[1], s)
        elif operation == "either":
            in_python(given[1] if s["seen"] % given[0] == 0 else given[2], s)
        elif operation == "repeat":
            for _ in range(given[0]):
                in_python(given[1], s)
        elif operation == "until":
            s["count"] = 0
            while s["count"] < given[0] and s["seen"] != 7:
                in_python(given[1], s)
                s["count"] += 1
    return s


def in_jax(program, s, zero):
    """The same on jax arrays, with the loops and branches under test."""
    for operation, *given in program:
        s = dict(s)
        if operation == "write":
            name, at, value = given
            s[name] = put(s[name], as_kind(name, value + s["seen"]), at % sizes(name))
        elif operation == "move":
            name, at, source, there = given
            value = get(s[source], there % sizes(source)).astype(int)
            s[name] = put(s[name], as_kind(name, value), at % sizes(name))
        elif operation == "read":
            s["seen"] = (s["seen"] + get(s[given[0]], given[1] % sizes(given[0]))) % 1000
        elif operation == "sum":
            s["seen"] = jnp.sum(s[given[0]]) % 1000
        elif operation == "chase":
            name, source = given
            at = jnp.abs(get(s[source], s["seen"] % sizes(source)).astype(int)) % sizes(name)
            s[name] = put(s[name], as_kind(name, s["seen"] % 13), at)
        elif operation == "swap" and sizes(given[0]) == sizes(given[1]):
            one, two = given
            if s[one].dtype == s[two].dtype:
                s[one], s[two] = s[two], s[one]
        elif operation == "when":
            there = s["seen"] % given[0] == 0
            s = inplace.when(there, lambda x, b=given[1]: in_jax(b, x, zero), s, zero)
        elif operation == "either":
            there = s["seen"] % given[0] == 0
            yes, no = (lambda x, b=b: in_jax(b, x, zero) for b in given[1:])
            s = inplace.either(there, yes, no, s, zero)
        elif operation == "repeat":
            body = lambda i, x, b=given[1]: in_jax(b, x, zero)  # noqa: E731
            s = inplace.fori_loop(given[0], body, s, zero)
        elif operation == "until":
            s = _until(given[0], given[1], s | {"count": jnp.zeros((), int)}, zero)
    return s


def _until(limit, block, s, zero):
    def body(x):
        x = in_jax(block, x, zero)
        return x | {"count": x["count"] + 1}

    going = lambda x: (x["count"] < limit) & (x["seen"] != 7)  # noqa: E731
    return inplace.while_loop(going, body, s, zero)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(programs)
def test_random_programs_compute_the_same(program):
    with jax.enable_x64(True):
        state = {k: jnp.asarray(v) for k, v in start().items()}
        run = jax.jit(
            lambda s, zero: in_jax(program, s, zero),
            compiler_options={"xla_backend_optimization_level": 0},
        )
        found = run(state, jnp.int64(0))
    expected = in_python(program, start())
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def test_a_branch_not_taken_and_a_loop_of_no_turns_change_nothing():
    state = (jnp.arange(SIZE), jnp.int32(3))
    ruin = lambda s: (s[0] * 0, s[1] + 1)  # noqa: E731
    zero = jnp.int32(0)
    for found in (
        inplace.when(jnp.asarray(False), ruin, state, zero),
        inplace.fori_loop(0, lambda i, s: ruin(s), state, zero),
        inplace.while_loop(lambda s: s[1] < 3, ruin, state, zero),
    ):
        assert np.array_equal(found[0], state[0]) and found[1] == 3


# The performance contract. The loop's carry holds about thirty arrays of one element per request.
# XLA copies such an array, whole, wherever it cannot prove that an update may happen in place, and
# one copy per event makes a run quadratic in the number of requests (8 MB per event for a million).
# So no instruction inside a loop may produce an array of that size, except those that write one
# element of it, hand it on or describe it.

REQUESTS = 7919
HANDS_ON = {"parameter", "get-tuple-element", "dynamic-update-slice", "while", "bitcast", "tuple"}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(")
CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def computations(text):
    """Name -> lines of the computations of an HLO module."""
    made, name = {}, None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            made[name] = []
        elif name is not None:
            made[name].append(line)
    return made


def called(line):
    names = CALLED.findall(line)
    for several in BRANCHES.findall(line):
        names += [name.strip().lstrip("%") for name in several.split(",")]
    return names


def inside_loops(text):
    """Lines of every computation that a loop runs, directly or not."""
    made = computations(text)
    reached = set()
    ahead = [n for lines in made.values() for x in lines if " while(" in x for n in called(x)]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += [n for line in made[name] for n in called(line)]
    return [line for name in reached for line in made[name]]


def only_operation(made, line, operation):
    """What a fusion of one operation does (newer XLA wraps even a lone update in one)."""
    if operation != "fusion":
        return operation
    matches = [INSTRUCTION.match(inner) for name in called(line) for inner in made[name]]
    inside = [match[2] for match in matches if match and match[2] != "parameter"]
    return inside[0] if len(inside) == 1 else operation


def whole_arrays(text, sizes):
    """(operation, line) of instructions inside loops whose result has one of `sizes` elements."""
    made = computations(text)
    matches = [(INSTRUCTION.match(line), line.strip()) for line in inside_loops(text)]
    return [
        (only_operation(made, line, match[2]), line)
        for match, line in matches
        if match and int(np.prod([int(n) for n in match[1].split(",")])) in sizes
    ]


def test_plain_loops_copy():
    """What this guards against: a branch around a write, and a read that may follow the write."""

    def body(carry):
        i, a, b = carry
        a = jax.lax.cond(b[i] > 0, lambda a: a.at[i].add(1), lambda a: a, a)
        return i + 1, a, b.at[i].set(a[i])

    plain = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 50, body, s))
    state = (jnp.int32(0), jnp.arange(REQUESTS), jnp.arange(REQUESTS))
    text = plain.lower(state).compile().as_text()
    assert {operation for operation, _ in whole_arrays(text, {REQUESTS})} - HANDS_ON


def service(*modes, **fields):
    return ClusterConfig(modes=modes, cost=cost(), slots=4, **fields)


P, C, N, X = Mode.PROMPT, Mode.COMPLETION, Mode.NORMAL, Mode.MIXED
SHARED = {
    "cache_scope": "shared",
    "cache_blocks": 500,
    "write_back_ticks": 3,
    "fetch_ticks": 2,
    "block_bytes": 4,
}
STORED = {"kv_blocks": 900, "swa": True, "publish_output": True}
TIERS = {"tier_edges": (300,), "tier_quota": (9, 9), "tier_round_ticks": 99}


@pytest.mark.parametrize(
    "cluster",
    [
        service(P, C, **SHARED),
        *(
            pytest.param(cluster, marks=pytest.mark.slow)
            for cluster in (
                service(P, P, C, C, ranks=2, **SHARED, **STORED, **TIERS),
                service(N, N, **STORED, cache_scope="local", cache_blocks=500),
                service(X, X, kv_blocks=900, nextn=1, acceptance=(0.5,)),
            )
        ),
    ],
)
def test_no_loop_copies_an_array_of_requests_or_segments(cluster):
    segments = 3001
    nodes = [(0, 0, 4), (0, 0, 5), *[(1, 4, 8)] * (segments - 3)]
    each = [1000] * REQUESTS
    load = workload([0] * REQUESTS, each, [5] * REQUESTS, nodes, [1] * REQUESTS, [2] * REQUESTS)
    options = {"xla_backend_optimization_level": 0}  # of LLVM: after the passes that copy
    text = prepare(cluster, load, options=options).executable.as_text()
    length = REQUESTS + 1
    caches = cluster.engines if cluster.cache_scope == "local" else 1
    sizes = {REQUESTS, length, length + 1, 8 * length + 1, segments, caches * segments}
    found = whole_arrays(text, sizes)
    assert sum(operation == "dynamic-update-slice" for operation, _ in found) > 40
    assert [line for operation, line in found if operation not in HANDS_ON] == []
