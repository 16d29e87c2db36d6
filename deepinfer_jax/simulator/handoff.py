"""Hand-off from a PROMPT to a COMPLETION engine: choice of rank, block reservation, transfer (`SEMANTICS.md` 7)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy.view import DecodeView, RequestView
from deepinfer_jax.simulator import queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import ceil_ticks
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import add, get, pop_front, push_back, put
from deepinfer_jax.simulator.events import HANDOFF, schedule
from deepinfer_jax.simulator.inplace import either, while_loop
from deepinfer_jax.simulator.state import State
from deepinfer_jax.simulator.steps import interrupt

Array = Any


def choose_rank(c: Cluster, state: State, request: Array) -> State:
    """Assigns a prefilled request to a decode rank; it reserves blocks and moves, or waits there."""
    prompt = get(state.prompt, request).astype(jnp.int64)
    blocks = queries.blocks_for(c, prompt)
    fits = (queries.free_blocks(c, state) >= blocks) & (state.wait_head == c.shape.requests)
    view = DecodeView(
        eligible=jnp.repeat(c.scenario.modes == int(Mode.COMPLETION), c.shape.ranks),
        room=fits & (state.assigned < c.shape.slots),
        requests=state.assigned,
        tokens=queries.kv_tokens(c, state) + state.pending_tokens,
        group=jnp.repeat(jnp.arange(c.shape.engines), c.shape.ranks),
    )
    zero = jnp.zeros_like(prompt)
    asked = RequestView(
        index=request,
        decisions=state.handoffs,
        draw=queries.policy_draw(c, request),
        input_tokens=prompt,
        context_tokens=prompt + 1,
        cost=zero,
        shared_hit_tokens=zero,
    )
    rank = jnp.asarray(c.shape.decode_policy(view, asked, c.scenario.policy), jnp.int32)
    state = state.replace(
        handoffs=state.handoffs + 1,
        target=put(state.target, rank, request),
        assigned=add(state.assigned, 1, rank),
        pending_tokens=add(state.pending_tokens, prompt, rank),
    )
    if not c.shape.kv_limited:
        return _reserve_and_send(c, state, rank, request)
    return either(
        get(fits, rank),
        lambda s: _reserve_and_send(c, s, rank, request),
        lambda s: _wait(s, rank, request),
        state,
        c.zero,
    )


def _wait(state: State, rank: Array, request: Array) -> State:
    following, head, tail = push_back(
        state.following, state.wait_head, state.wait_tail, rank, request
    )
    return state.replace(following=following, wait_head=head, wait_tail=tail)


def _reserve_and_send(c: Cluster, state: State, rank: Array, request: Array) -> State:
    prompt = get(state.prompt, request).astype(jnp.int64)
    source = get(state.engine, request)
    prompt_blocks = -(-prompt // c.scenario.block_tokens)
    moved = prompt_blocks * c.scenario.block_bytes + c.scenario.live_bytes
    free = state.now + ceil_ticks(moved * c.scenario.handoff_rate)
    if c.shape.handoff_fifo:
        busy_until = get(state.handoff_free, source)
        free = jnp.maximum(state.now, busy_until) + ceil_ticks(moved * c.scenario.handoff_rate)
        state = state.replace(handoff_free=put(state.handoff_free, free, source))
    state = state.replace(
        reserved=add(state.reserved, queries.blocks_for(c, prompt), rank),
        handoff_bytes=state.handoff_bytes + moved,
    )
    if c.shape.kv_limited:
        # A run was planned with the blocks that are now reserved.
        state = interrupt(state, rank // c.shape.ranks)
    return schedule(c, state, free + c.scenario.handoff_ticks, request, HANDOFF)


def admit_waiting(c: Cluster, state: State, rank: Array) -> State:
    """Blocks of `rank` were released: those who wait for blocks reserve them while they fit."""
    if not (c.shape.kv_limited and c.shape.completion):
        return state

    def fits(state: State) -> Array:
        head = get(state.wait_head, rank)
        blocks = queries.blocks_for(c, get(state.prompt, head).astype(jnp.int64))
        waiting = head != c.shape.requests
        return waiting & (queries.rank_free_blocks(c, state, rank) >= blocks)

    def admit(state: State) -> State:
        request = get(state.wait_head, rank)
        head = pop_front(state.following, state.wait_head, rank)
        return _reserve_and_send(c, state.replace(wait_head=head), rank, request)

    return while_loop(fits, admit, state, c.zero)


def end_handoff(c: Cluster, state: State, request: Array) -> State:
    """The state of `request` has landed: it waits for a slot, from the next boundary on."""
    rank = get(state.target, request)
    following, head, tail = push_back(
        state.following, state.join_head, state.join_tail, rank, request
    )
    state = state.replace(
        following=following,
        join_head=head,
        join_tail=tail,
        handed_off=put(state.handed_off, state.now, request),
    )
    return interrupt(state, rank // c.shape.ranks)
