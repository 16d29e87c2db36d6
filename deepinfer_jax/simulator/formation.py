"""Batch formation (phase 6) of each engine mode, and the end of a step (phase 0)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import decode, prefill, queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import (
    NEVER,
    SUBS_PER_FEMTOSECOND,
    advance_femtoseconds,
    advance_subs,
)
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import get, put
from deepinfer_jax.simulator.inplace import either, when
from deepinfer_jax.simulator.state import DECODE, MIXED_STEP, PREFILL, State
from deepinfer_jax.simulator.steps import (
    close_step,
    decode_exchange,
    engine_row,
    go_idle,
    rank_times,
    start_step,
    wake,
)

Array = Any


def end_step(c: Cluster, state: State, engine: Array) -> State:
    """Phase 0: decode rows advance and finish, then the chunks end."""
    state, kind, made = close_step(state, engine)
    mode = get(c.scenario.modes, engine)
    local = (mode == int(Mode.NORMAL)) | (mode == int(Mode.MIXED))
    if c.shape.completion or c.shape.normal or c.shape.mixed:
        state = when(kind != PREFILL, lambda s: decode.advance(c, s, engine, made), state, c.zero)
    return when(kind != DECODE, lambda s: prefill.end_batches(c, s, engine, local), state, c.zero)


def form(c: Cluster, state: State, engine: Array) -> State:
    """Phase 6: what `engine` does next."""
    state = wake(state, engine)
    handlers = {
        Mode.PROMPT: (c.shape.prompt, form_prompt),
        Mode.COMPLETION: (c.shape.completion, decode.form_completion),
        Mode.NORMAL: (c.shape.normal, form_normal),
        Mode.MIXED: (c.shape.mixed, form_mixed),
    }
    present = {mode: handler for mode, (used, handler) in handlers.items() if used}
    if len(present) == 1:
        return next(iter(present.values()))(c, state, engine)
    for mode, handler in present.items():
        mine = get(c.scenario.modes, engine) == int(mode)
        state = when(mine, lambda s, f=handler: f(c, s, engine), state, c.zero)
    return state


def _start_prefill(c: Cluster, state: State, engine: Array, times: Array, tokens: Array) -> State:
    lasts = jnp.max(times) + prefill.prefill_exchange(c, tokens)
    end = advance_femtoseconds(
        get(state.clock_tick, engine), get(state.clock_remainder, engine), lasts
    )
    return start_step(state, engine, PREFILL, end, jnp.int64(0))


def _everyone(c: Cluster) -> Array:
    return jnp.ones(c.shape.ranks, bool)


def form_prompt(c: Cluster, state: State, engine: Array) -> State:
    """PROMPT: a quota-limited batch on every rank."""
    no = jnp.asarray(False)
    state, times, tokens = prefill.form_batches(c, state, engine, _everyone(c), no, no)
    return either(
        tokens > 0,
        lambda s: _start_prefill(c, s, engine, times, tokens),
        lambda s: go_idle(s, engine),
        state,
        c.zero,
    )


def form_mixed(c: Cluster, state: State, engine: Array) -> State:
    """MIXED: decode rows and, in what the token budget leaves, chunks; without chunks a decode run."""
    yes = jnp.asarray(True)
    state = decode.preempt(c, state, engine)
    state, times, tokens = prefill.form_batches(c, state, engine, _everyone(c), yes, yes)

    def mixed(state: State) -> State:
        decode_times = jnp.max(rank_times(c, state, engine)[0], axis=1)
        exchange = prefill.prefill_exchange(c, tokens) * SUBS_PER_FEMTOSECOND
        exchange = exchange + decode_exchange(c, state, engine)
        subs = jnp.max(decode_times + times * SUBS_PER_FEMTOSECOND) + exchange
        end = advance_subs(get(state.clock_tick, engine), get(state.clock_remainder, engine), subs)
        return start_step(state, engine, MIXED_STEP, end, jnp.int64(1))

    run = lambda s: decode.run_or_idle(c, s, engine, jnp.int64(NEVER))  # noqa: E731
    return either(tokens > 0, mixed, run, state, c.zero)


def form_normal(c: Cluster, state: State, engine: Array) -> State:
    """NORMAL: a prompt step where the vote says so and somebody can be scheduled, else decode."""
    state = decode.preempt(c, state, engine)
    wanting, point = _vote(c, state, engine)
    yes, no = jnp.asarray(True), jnp.asarray(False)
    state, times, tokens = prefill.form_batches(c, state, engine, wanting & point, yes, no)

    def prompt_step(state: State) -> State:
        state = state.replace(since_prompt=put(state.since_prompt, 0, engine))
        return _start_prefill(c, state, engine, times, tokens)

    def decode_run(state: State) -> State:
        since = get(state.since_prompt, engine)
        every, any_of = c.scenario.prompt_interval, c.scenario.prompt_any_interval
        next_vote = jnp.minimum(every - since % every, any_of - since % any_of)
        queued = jnp.any(engine_row(c, state.fifo_head, engine) != c.shape.requests)
        limit = jnp.where(queued, next_vote, NEVER)
        return decode.run_or_idle(c, state, engine, limit)

    return either(tokens > 0, prompt_step, decode_run, state, c.zero)


def _vote(c: Cluster, state: State, engine: Array) -> tuple[Array, Array]:
    """(ranks that want a prompt step [J], whether the vote lets them)."""
    queued = engine_row(c, state.fifo_head, engine) != c.shape.requests
    wanting = queued
    if c.shape.kv_limited:
        free = engine_row(c, queries.free_blocks(c, state), engine)
        share, whole = c.scenario.prompt_usage_limit[0], c.scenario.prompt_usage_limit[1]
        used = c.scenario.kv_blocks - free
        wanting = queued & (used * whole <= share * c.scenario.kv_blocks)
    since = get(state.since_prompt, engine)
    any_point = (since != 0) & (since % c.scenario.prompt_any_interval == 0)
    all_point = since % c.scenario.prompt_interval == 0
    empty = ~jnp.any(engine_row(c, state.rows, engine) > 0)
    agreed = jnp.where(any_point, jnp.any(wanting), all_point & jnp.all(wanting))
    return jnp.where(empty, queued, wanting), jnp.where(empty, True, agreed)
