"""Hand-off from a PROMPT to a COMPLETION engine: choice of rank, block reservation, transfer (`SEMANTICS.md` 7)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy.view import DecodeView, RequestView
from deepinfer_jax.simulator import queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import ceil_ticks
from deepinfer_jax.simulator.containers import add, get, pop_front, push_back, put
from deepinfer_jax.simulator.events import HANDOFF, schedule
from deepinfer_jax.simulator.inplace import either, when, while_loop
from deepinfer_jax.simulator.state import LANDED, MOVING, ORPHAN, WAITING, State, move
from deepinfer_jax.simulator.steps import interrupt

Array = Any


def choose_rank(c: Cluster, state: State, request: Array) -> State:
    """Assigns a prefilled request to a decode rank; it reserves blocks and moves, or waits there.

    Where engines have lives and none can take it, it becomes an orphan.
    """
    if not c.shape.dynamics:
        prompt = get(state.prompt, request).astype(jnp.int64)
        rank, fits = chosen(c, state, request, prompt)
        state = assign(state, rank, request, prompt)
        if not c.shape.kv_limited:
            return reserve_and_send(c, state, rank, request)
        return either(
            get(fits, rank),
            lambda s: reserve_and_send(c, s, rank, request),
            lambda s: _wait(s, rank, request),
            state,
            c.zero,
        )
    source = get(state.engine, request)
    state = state.replace(
        source=put(state.source, source, request), held=add(state.held, 1, source)
    )
    return choose(c, state, request, reserve_and_send)


def choose(c: Cluster, state: State, request: Array, send: Any) -> State:
    """A held request chooses a rank: `send(c, state, rank, request)` if it fits, else it waits there;
    an orphan without any rank."""
    prompt = get(state.prompt, request).astype(jnp.int64)
    rank, fits = chosen(c, state, request, prompt)
    found = rank < c.shape.all_ranks
    rank = jnp.minimum(rank, c.shape.all_ranks - 1)
    fits = get(fits, rank)
    state = when(found, lambda s: assign(s, rank, request, prompt), state, c.zero)
    state = when(found & fits, lambda s: send(c, s, rank, request), state, c.zero)
    if c.shape.kv_limited:
        state = when(found & ~fits, lambda s: _wait(s, rank, request), state, c.zero)

    def orphan(state: State) -> State:
        return move(push_orphan(state, request), request, ORPHAN)

    return when(~found, orphan, state, c.zero)


def push_orphan(state: State, request: Array) -> State:
    """The request joins the lane of those who choose again."""
    following, head, tail = push_back(
        state.following, state.orphan_head, state.orphan_tail, jnp.int32(0), request
    )
    return state.replace(
        following=following, orphan_head=head, orphan_tail=tail, orphans=state.orphans + 1
    )


def chosen(c: Cluster, state: State, request: Array, prompt: Array) -> tuple[Array, Array]:
    """(rank the decode policy picks, or R; bool [R]: the request's blocks fit and nobody waits)."""
    blocks = queries.blocks_for(c, prompt)
    fits = (queries.free_blocks(c, state) >= blocks) & (state.wait_head == c.shape.requests)
    view = DecodeView(
        eligible=queries.takes_completions(c, state),
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
    return jnp.asarray(c.shape.decode_policy(view, asked, c.scenario.policy), jnp.int32), fits


def assign(state: State, rank: Array, request: Array, prompt: Array) -> State:
    """The request counts at `rank` from now on."""
    return state.replace(
        handoffs=state.handoffs + 1,
        target=put(state.target, rank, request),
        assigned=add(state.assigned, 1, rank),
        pending_tokens=add(state.pending_tokens, prompt, rank),
    )


def _wait(state: State, rank: Array, request: Array) -> State:
    following, head, tail = push_back(
        state.following, state.wait_head, state.wait_tail, rank, request
    )
    state = state.replace(following=following, wait_head=head, wait_tail=tail)
    return move(state, request, WAITING)


def moved_bytes(c: Cluster, prompt: Array) -> Array:
    """Bytes of a transfer of `prompt` tokens: their blocks and the live state."""
    prompt_blocks = -(-prompt // c.scenario.block_tokens)
    return prompt_blocks * c.scenario.block_bytes + c.scenario.live_bytes


def reserve_and_send(c: Cluster, state: State, rank: Array, request: Array) -> State:
    prompt = get(state.prompt, request).astype(jnp.int64)
    source = get(state.source if c.shape.dynamics else state.engine, request)
    moved = moved_bytes(c, prompt)
    free = state.now + ceil_ticks(moved * c.scenario.handoff_rate)
    if c.shape.handoff_fifo:
        busy_until = get(state.handoff_free, source)
        free = jnp.maximum(state.now, busy_until) + ceil_ticks(moved * c.scenario.handoff_rate)
        state = state.replace(handoff_free=put(state.handoff_free, free, source))
    state = state.replace(
        reserved=add(state.reserved, queries.blocks_for(c, prompt), rank),
        handoff_bytes=state.handoff_bytes + moved,
    )
    state = move(state, request, MOVING)
    if c.shape.kv_limited:
        # A run was planned with the blocks that are now reserved.
        state = interrupt(state, rank // c.shape.ranks)
    return schedule(c, state, free + c.scenario.handoff_ticks, request, HANDOFF)


def admit_waiting(c: Cluster, state: State, rank: Array, inside_run: bool = False) -> State:
    """Blocks of `rank` were released: those who wait for blocks reserve them while they fit.

    Its engine stands at a boundary, unless `inside_run`.
    """
    if not (c.shape.kv_limited and c.shape.completion):
        return state

    def fits(state: State) -> Array:
        head = get(state.wait_head, rank)
        blocks = queries.blocks_for(c, get(state.prompt, head).astype(jnp.int64))
        waiting = head != c.shape.requests
        if inside_run:
            return waiting & (get(queries.free_blocks(c, state), rank) >= blocks)
        return waiting & (queries.rank_free_blocks(c, state, rank) >= blocks)

    def admit(state: State) -> State:
        request = get(state.wait_head, rank)
        head = pop_front(state.following, state.wait_head, rank)
        return reserve_and_send(c, state.replace(wait_head=head), rank, request)

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
    if c.shape.dynamics:
        state = state.replace(held=add(state.held, -1, get(state.source, request)))
        state = move(state, request, LANDED)
    return interrupt(state, rank // c.shape.ranks)
