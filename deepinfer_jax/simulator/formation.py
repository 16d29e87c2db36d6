"""Batch formation (phase 6) of each engine mode, and the end of a step (phase 0)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import decode, prefill, prompts, queries
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
    rank_times,
    start_step,
    wake,
)

Array = Any


def end_step(c: Cluster, state: State, engine: Array) -> State:
    """Phase 0: decode rows advance and finish, then the chunks end."""
    state, kind, made = close_step(c, state, engine)
    mode = get(c.scenario.modes, engine)
    local = (mode == int(Mode.NORMAL)) | (mode == int(Mode.MIXED))
    state = when(kind != PREFILL, lambda s: decode.advance(c, s, engine, made), state, c.zero)
    return when(kind != DECODE, lambda s: prompts.end_batches(c, s, engine, local), state, c.zero)


def form(c: Cluster, state: State, engine: Array) -> State:
    """Phase 6: what `engine` does next: a step with chunks, a decode run, or nothing."""
    mode = get(c.scenario.modes, engine)
    normal, mixed = mode == int(Mode.NORMAL), mode == int(Mode.MIXED)
    state = decode.preempt(c, wake(state, engine), engine)
    if c.shape.completion:
        landed = mode == int(Mode.COMPLETION)
        state = when(landed, lambda s: decode.join_landed(c, s, engine), state, c.zero)
    wanting = jnp.full(c.shape.ranks, mode != int(Mode.COMPLETION))
    if c.shape.normal:
        wanting = jnp.where(normal, _vote(c, state, engine), wanting)
    state, times, tokens = prefill.form_batches(c, state, engine, wanting, normal | mixed, mixed)
    return either(
        tokens > 0,
        lambda s: _start_chunks(c, s, engine, times, tokens, mixed),
        lambda s: decode.run_or_idle(c, s, engine, _steps_to_vote(c, s, engine, normal)),
        state,
        c.zero,
    )


def _start_chunks(
    c: Cluster, state: State, engine: Array, times: Array, tokens: Array, mixed: Array
) -> State:
    """A prefill step, or a MIXED one that also advances the decode rows."""
    exchange = prefill.prefill_exchange(c, tokens)
    tick, remainder = get(state.clock_tick, engine), get(state.clock_remainder, engine)
    end = advance_femtoseconds(tick, remainder, jnp.max(times) + exchange)
    state = state.replace(since_prompt=put(state.since_prompt, 0, engine))
    if not c.shape.mixed:
        return start_step(state, engine, PREFILL, end, jnp.int64(0))
    decode_times = jnp.max(rank_times(c, state, engine)[0], axis=1)
    subs = jnp.max(decode_times + times * SUBS_PER_FEMTOSECOND)
    subs = subs + exchange * SUBS_PER_FEMTOSECOND + decode_exchange(c, state, engine)
    mixed_end = advance_subs(tick, remainder, subs)
    end = jnp.where(mixed, mixed_end[0], end[0]), jnp.where(mixed, mixed_end[1], end[1])
    kind = jnp.where(mixed, MIXED_STEP, PREFILL)
    return start_step(state, engine, kind, end, mixed.astype(jnp.int64))


def _steps_to_vote(c: Cluster, state: State, engine: Array, normal: Array) -> Array:
    """NORMAL: decode steps until the next vote, where somebody waits for a prompt step."""
    if not c.shape.normal:
        return jnp.int64(NEVER)
    since = get(state.since_prompt, engine)
    every, any_of = c.scenario.prompt_interval, c.scenario.prompt_any_interval
    next_vote = jnp.minimum(every - since % every, any_of - since % any_of)
    queued = jnp.any(engine_row(c, state.fifo_head, engine) != c.shape.requests)
    return jnp.where(normal & queued, next_vote, NEVER)


def _vote(c: Cluster, state: State, engine: Array) -> Array:
    """NORMAL: ranks [J] that want a prompt step, none unless the vote lets them."""
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
    everyone = wanting
    if c.shape.crashes:
        everyone = wanting | ~engine_row(c, state.alive, engine)
    agreed = jnp.where(any_point, jnp.any(wanting), all_point & jnp.all(everyone))
    return jnp.where(empty, queued, wanting & agreed)
