"""Starting, interrupting and closing engine steps; decode runs in closed form (`SEMANTICS.md` 1, 8).

A run is a stretch of decode steps with one membership whose slowest (rank, roofline form) stays the
same: step i lasts `run_first + i * run_slope` subs, so its end is a quadratic, exact in integers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import (
    NEVER,
    SUBS_PER_FEMTOSECOND,
    SUBS_PER_TICK,
    advance_subs,
    run_subs,
    steps_to_reach,
)
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.inplace import fori_loop, when
from deepinfer_jax.simulator.scenario import SERIES_BINS
from deepinfer_jax.simulator.state import DECODE, IDLE, State, append

Array = Any

RUN_SUBS = 2**61
"""Bound of a run's first and of its further subs, so that their sum fits int64."""


def engine_row(c: Cluster, per_rank: Array, engine: Array) -> Array:
    """[J] entries of an engine's ranks in a [R] array."""
    return get(per_rank.reshape(c.shape.engines, c.shape.ranks), engine)


def set_engine_row(c: Cluster, per_rank: Array, row: Array, engine: Array) -> Array:
    """A [R] array with the entries of an engine's ranks replaced."""
    grid = per_rank.reshape(c.shape.engines, c.shape.ranks)
    return put(grid, row, engine).reshape(-1)


def start_step(
    state: State, engine: Array, kind: Array | int, end: tuple[Array, Array], decode_steps: Array
) -> State:
    """`engine` begins a step (or run) at its clock that ends at clock `end`."""
    return state.replace(
        step_kind=put(state.step_kind, kind, engine),
        step_start=put(state.step_start, get(state.clock_tick, engine), engine),
        step_end=put(state.step_end, end[0], engine),
        end_remainder=put(state.end_remainder, end[1], engine),
        run_steps=put(state.run_steps, decode_steps, engine),
        dirty=put(state.dirty, False, engine),
    )


def go_idle(state: State, engine: Array) -> State:
    """`engine` has nothing to run; its clock's remainder is dropped."""
    zero = jnp.zeros((), state.clock_remainder.dtype)
    return state.replace(
        dirty=put(state.dirty, False, engine),
        clock_remainder=put(state.clock_remainder, zero, engine),
        clock_tick=put(state.clock_tick, -1, engine),
    )


def wake(state: State, engine: Array) -> State:
    """An idle engine's clock starts at now."""
    tick = get(state.clock_tick, engine)
    return state.replace(
        clock_tick=put(state.clock_tick, jnp.where(tick < 0, state.now, tick), engine)
    )


def close_step(c: Cluster, state: State, engine: Array) -> tuple[State, Array, Array]:
    """Moves the engine's clock to the end of its step; returns (state, kind, decode steps made)."""
    kind, made = get(state.step_kind, engine), get(state.run_steps, engine)
    if state.run_log is not None:
        state = when(made > 0, lambda s: log_run(s, engine, made), state, c.zero)
    end = get(state.step_end, engine)
    state = tally(
        state, engine, kind, jnp.maximum(made, 1), end - get(state.step_start, engine), end
    )
    state = state.replace(
        clock_tick=put(state.clock_tick, end, engine),
        clock_remainder=put(state.clock_remainder, get(state.end_remainder, engine), engine),
        step_end=put(state.step_end, NEVER, engine),
        step_kind=put(state.step_kind, IDLE, engine),
        run_steps=put(state.run_steps, 0, engine),
        steps=add(state.steps, made, engine),
        since_prompt=add(state.since_prompt, made, engine),
        dirty=put(state.dirty, True, engine),
    )
    return state, kind, made


def tally(
    state: State, engine: Array, kind: Array, steps: Array, lasted: Array, end: Array
) -> State:
    """Counts `steps` of a kind that lasted until `end`."""
    bin_width = jnp.maximum(1, state.bin_ticks)
    time_bin = jnp.minimum(end // bin_width, SERIES_BINS - 1).astype(jnp.int32)
    return state.replace(
        busy=add(state.busy, lasted, engine, kind),
        step_count=add(state.step_count, steps, engine, kind),
        series=add(state.series, lasted, time_bin, engine),
    )


def log_run(state: State, engine: Array, made: Array) -> State:
    """Records `made` decode steps of the step under way: (engine, first step, tick, remainder, first
    duration, slope, steps); a MIXED step as one of no duration at its end."""
    mixed = get(state.step_kind, engine) != DECODE
    tick = jnp.where(mixed, get(state.step_end, engine), get(state.clock_tick, engine))
    inside = (state.clock_remainder, state.run_first, state.run_slope)
    rest = (jnp.where(mixed, 0, get(x, engine)) for x in inside)
    row = (engine, get(state.steps, engine), tick, *rest, made)
    log, count = append(state.run_log, state.runs, *row)
    return state.replace(run_log=log, runs=count)


def rank_times(c: Cluster, state: State, engine: Array) -> tuple[Array, Array]:
    """([J, F] subs of the next decode step, [J, F] subs each further step adds) of an engine's ranks."""
    rows = engine_row(c, state.rows, engine).astype(jnp.int64)
    kv = engine_row(c, state.kv, engine)
    growth = engine_row(c, state.growth, engine)
    forms = c.scenario.cost.decode_forms
    fixed = (forms[:, 0] + forms[:, 1] * rows[:, None]) * SUBS_PER_FEMTOSECOND
    times = fixed + forms[:, 2] * kv[:, None]
    busy = (rows > 0)[:, None]
    return jnp.where(busy, times, 0), jnp.where(busy, forms[:, 2] * growth[:, None], 0)


def decode_exchange(c: Cluster, state: State, engine: Array) -> Array:
    """Subs of the expert exchange of a decode step of all rows of an engine."""
    rows = jnp.sum(engine_row(c, state.rows, engine)).astype(jnp.int64)
    cost = c.scenario.cost
    subs = (cost.decode_exchange_base + cost.decode_exchange_row * rows) * SUBS_PER_FEMTOSECOND
    return jnp.where(rows > 0, subs, 0)


def start_run(c: Cluster, state: State, engine: Array, limit: Array) -> State:
    """Starts a run of decode steps, at most `limit` long, up to the next finish or change of leader."""
    times, slopes = rank_times(c, state, engine)
    lead = jnp.max(times)
    slope = jnp.max(jnp.where(times == lead, slopes, 0))
    steeper = slopes > slope
    gap = jnp.where(steeper, slopes - slope, 1)
    crossing = jnp.min(jnp.where(steeper, (lead - times) // gap + 1, NEVER)).astype(jnp.int64)
    first = lead + decode_exchange(c, state, engine)
    until_finish = jnp.min(engine_row(c, state.next_finish, engine)) - get(state.steps, engine)
    steps = jnp.minimum(jnp.minimum(until_finish, crossing), limit)
    steps = jnp.maximum(jnp.minimum(steps, _longest(first, slope)), 1)
    state = state.replace(
        run_first=put(state.run_first, first, engine), run_slope=put(state.run_slope, slope, engine)
    )
    return start_step(state, engine, DECODE, _run_end(state, engine, steps), steps)


def _longest(first: Array, slope: Array) -> Array:
    flat = RUN_SUBS // jnp.maximum(first, 1)
    steep = jnp.sqrt(RUN_SUBS / jnp.maximum(slope, 1))
    return jnp.minimum(flat, steep).astype(jnp.int64)


def _run_end(state: State, engine: Array, steps: Array) -> tuple[Array, Array]:
    subs = run_subs(steps, get(state.run_first, engine), get(state.run_slope, engine))
    return advance_subs(get(state.clock_tick, engine), get(state.clock_remainder, engine), subs)


def interrupt(state: State, engine: Array) -> State:
    """Marks `engine` dirty and cuts a decode run at its first boundary at or after now."""
    first, slope = get(state.run_first, engine), get(state.run_slope, engine)
    elapsed = (state.now - get(state.clock_tick, engine)) * SUBS_PER_TICK
    target = elapsed - get(state.clock_remainder, engine)
    running = get(state.step_kind, engine) == DECODE
    target = jnp.where(running, target, 1)
    cut = jnp.maximum(steps_to_reach(target, jnp.maximum(first, 1), slope), 1)
    planned = get(state.run_steps, engine)
    steps = jnp.where(running, jnp.minimum(cut, planned), planned)
    end, remainder = _run_end(state, engine, steps)
    return state.replace(
        dirty=put(state.dirty, True, engine),
        run_steps=put(state.run_steps, steps, engine),
        step_end=put(state.step_end, jnp.where(running, end, get(state.step_end, engine)), engine),
        end_remainder=put(
            state.end_remainder,
            jnp.where(running, remainder, get(state.end_remainder, engine)),
            engine,
        ),
    )


def over_ranks(c: Cluster, engine: Array, state: State, visit: Any) -> State:
    """`visit(state, rank)` for the global rank of each local rank of `engine`, ascending."""
    if c.shape.ranks == 1:
        return visit(state, engine)
    first = engine * c.shape.ranks
    return fori_loop(c.shape.ranks, lambda j, s: visit(s, first + j), state, c.zero)
