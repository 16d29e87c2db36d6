"""Questions the stages ask of the state: predicted costs, progress inside a run, blocks, random draws."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import SUBS_PER_TICK, ceil_ticks, is_exact, steps_within
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import get
from deepinfer_jax.simulator.state import DECODE, MIXED_STEP, SERVING, State

Array = Any

GOLDEN = 0x9E3779B97F4A7C15


def predicted_ticks(c: Cluster, new: Array, cached: Array) -> Array:
    """Quota a prompt with `new` tokens over `cached` still owes; nothing left costs nothing."""
    work = c.scenario.cost.prefill_work(new.astype(jnp.int64), cached.astype(jnp.int64))
    ticks = ceil_ticks(work)
    if not c.shape.exact:
        # Whole ticks in float time too: sums of them are exact, so an engine gets empty again.
        ticks = jnp.ceil(ticks)
    return jnp.where(new > 0, jnp.maximum(ticks, 1), 0).astype(ticks.dtype)


def owed_quota(c: Cluster, state: State, request: Array) -> Array:
    """Quota that `request` has been debited and not credited."""
    context = get(state.context, request)
    return predicted_ticks(c, get(state.prompt, request) - context, context)


def takes_prompts(c: Cluster, state: State) -> Array:
    """bool [M]: every mode but COMPLETION, where engines have lives: those that serve."""
    takers = c.scenario.modes != 1
    return takers & (state.life == SERVING) if c.shape.dynamics else takers


def takes_completions(c: Cluster, state: State) -> Array:
    """bool [R]: ranks of COMPLETION engines, where engines have lives: alive ones of those that serve."""
    ranks = jnp.repeat(c.scenario.modes == int(Mode.COMPLETION), c.shape.ranks)
    if not c.shape.dynamics:
        return ranks
    return ranks & jnp.repeat(state.life == SERVING, c.shape.ranks) & state.alive


def steps_reached(c: Cluster, state: State) -> Array:
    """[M] decode steps of the current run whose boundary lies at or before now (0 outside a run)."""
    elapsed = (state.now - state.clock_tick + (1 if is_exact(state.now) else 0)) * SUBS_PER_TICK
    budget = elapsed - state.clock_remainder - (1 if is_exact(state.now) else 0)
    running = state.step_kind == DECODE
    budget = jnp.where(running, budget, 0)
    steps = steps_within(budget, state.run_first, state.run_slope)
    mixed = (state.step_kind == MIXED_STEP) & (state.step_end <= state.now)
    return jnp.where(running, jnp.minimum(steps, state.run_steps), mixed)


def kv_tokens(c: Cluster, state: State) -> Array:
    """[R] KV tokens of the running requests at the last boundary at or before now."""
    reached = jnp.repeat(steps_reached(c, state), c.shape.ranks)
    return (state.kv + reached * state.growth) // 256


def blocks_for(c: Cluster, tokens: Array) -> Array:
    """Blocks that hold `tokens` and the rows of one more step."""
    return -(-(tokens + 1 + c.shape.nextn) // c.scenario.block_tokens)


def running_blocks(c: Cluster, state: State) -> Array:
    """[R] blocks the running requests need at the last boundary at or before now."""
    step = jnp.repeat(state.steps + steps_reached(c, state), c.shape.ranks)
    stayed = step[:, None] - state.slot_join
    tokens = state.slot_prompt + (stayed * state.slot_growth) // 256
    busy = state.slot_request != c.shape.requests
    return jnp.sum(jnp.where(busy, blocks_for(c, tokens), 0), axis=1)


def free_blocks(c: Cluster, state: State) -> Array:
    """[R] blocks neither needed by the running nor reserved; without a limit, enough for anything."""
    if not c.shape.kv_limited:
        return jnp.full(c.shape.all_ranks, 2**40, jnp.int64)
    return c.scenario.kv_blocks - state.reserved - running_blocks(c, state)


def rank_free_blocks(c: Cluster, state: State, rank: Array) -> Array:
    """`free_blocks` of one rank whose engine stands at a boundary."""
    if not c.shape.kv_limited:
        return jnp.int64(2**40)
    return c.scenario.kv_blocks - get(state.reserved, rank) - rank_running_blocks(c, state, rank)


def rank_running_blocks(c: Cluster, state: State, rank: Array) -> Array:
    """`running_blocks` of one rank whose engine stands at a boundary."""
    stayed = get(state.steps, rank // c.shape.ranks) - get(state.slot_join, rank)
    tokens = get(state.slot_prompt, rank) + (stayed * get(state.slot_growth, rank)) // 256
    busy = get(state.slot_request, rank) != c.shape.requests
    return jnp.sum(jnp.where(busy, blocks_for(c, tokens), 0))


def mix(value: Array) -> Array:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64 with full avalanche."""
    value = (value ^ (value >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> 27)) * jnp.uint64(0x94D049BB133111EB)
    return value ^ (value >> 31)


def request_stream(seed: Array, request: Array) -> Array:
    """uint64 that keys all randomness of one request."""
    return mix(seed.astype(jnp.uint64) + jnp.uint64(GOLDEN) * (request.astype(jnp.uint64) + 1))


def policy_draw(c: Cluster, request: Array) -> Array:
    """31 uniform bits of `request` for randomised policies."""
    return (mix(request_stream(c.scenario.seed, request)) >> 33).astype(jnp.int64)


def steps_needed(c: Cluster, request: Array, owed: Array, first: Array) -> Array:
    """Decode steps until `owed` tokens are committed, drawing acceptances from step `first` on."""
    if c.shape.nextn == 0:
        return owed.astype(jnp.int64)
    stream = request_stream(c.scenario.seed, request)

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        left, count = carry
        index = (first.astype(jnp.int64) + count + 1).astype(jnp.uint64)
        draw = (mix(stream + jnp.uint64(GOLDEN) * index) >> 11).astype(jnp.int64)
        return left - 1 - jnp.sum(draw < c.scenario.survival), count + 1

    return lax.while_loop(lambda x: x[0] > 0, step, (owed.astype(jnp.int64), jnp.int64(0)))[1]
