"""Matching (phase 4) and placement (phase 5): what a request finds, and which engine takes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.policy import prefill as policies
from deepinfer_jax.policy.view import PrefillView, RequestView
from deepinfer_jax.simulator import autoscale, cache, prefill, queries, retention, storage, tiers
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import ceil_ticks
from deepinfer_jax.simulator.cluster import Status
from deepinfer_jax.simulator.containers import add, get, pop_front, push_back, put
from deepinfer_jax.simulator.ending import end
from deepinfer_jax.simulator.events import FETCH, schedule
from deepinfer_jax.simulator.inplace import either, when, while_loop
from deepinfer_jax.simulator.state import FETCHING, State, move

Array = Any

# Phase 4


def match(c: Cluster, state: State, request: Array) -> State:
    """The match of `request` ends: reject it, or find its prefix and queue it."""
    fresh = get(state.emitted, request) == 0
    status = jnp.where(fresh, _rejection(c, request), -1)
    state = state.replace(matched=put(state.matched, state.now, request))
    return either(
        status >= 0,
        lambda s: end(c, s, request, status),
        lambda s: _queue(c, _find_prefix(c, s, request), request),
        state,
        c.zero,
    )


def _rejection(c: Cluster, request: Array) -> Array:
    length = get(c.workload.input_tokens, request)
    status = jnp.where(length > c.scenario.max_input_tokens, int(Status.TOO_LONG), -1)
    if c.shape.kv_limited:
        total = length + get(c.workload.output_tokens, request) + c.shape.nextn
        fits = -(-total // c.scenario.block_tokens) <= c.scenario.kv_blocks
        status = jnp.where((status < 0) & ~fits, int(Status.DOES_NOT_FIT), status)
    return status


def _hit(c: Cluster, state: State, store: Array, node: Array) -> tuple[Array, Array]:
    """(L1 in blocks, H in tokens), now, where `node` is the deepest match in cache `store`."""
    blocks = cache.matched_blocks(c, state, store, node)
    return blocks, _usable(c, state, store, node, blocks)


def _usable(c: Cluster, state: State, store: Array, node: Array, blocks: Array) -> Array:
    """H in tokens where `blocks` leading blocks were matched, the last of them in `node`."""
    tokens = blocks * c.scenario.block_tokens.astype(jnp.int32)
    if not c.shape.swa:
        return tokens
    live = cache.anchor_live(c, state, store, node)
    if c.shape.storage_nodes:
        live = live & (blocks == get(c.workload.node_end, node))
    backed_off = jnp.maximum(tokens - c.scenario.block_tokens.astype(jnp.int32), 0)
    return jnp.where(live, tokens, backed_off)


def _record_hit(state: State, request: Array, node: Array, blocks: Array, tokens: Array) -> State:
    return state.replace(
        hit_node=put(state.hit_node, node, request),
        hit_blocks=put(state.hit_blocks, blocks, request),
        hit_compute=put(state.hit_compute, tokens, request),
        context=put(state.context, tokens, request),
    )


def _find_prefix(c: Cluster, state: State, request: Array) -> State:
    length = get(c.workload.input_tokens, request) + get(state.emitted, request)
    state = state.replace(prompt=put(state.prompt, length, request))
    if c.shape.cache_scope != "shared":
        return _record_hit(state, request, jnp.int32(0), jnp.int32(0), jnp.int32(0))
    store = jnp.int32(0)
    state, node = cache.deepest_match(c, state, store, get(c.workload.match_node, request))
    blocks = cache.matched_blocks(c, state, store, node)
    state, node, blocks = storage.readable_prefix(c, state, node, blocks)
    tokens = _usable(c, state, store, node, blocks)
    state = _record_hit(state, request, node, blocks, tokens)
    return cache.pin(c, retention.touch(c, state, store, node, request), node, 1)


def _queue(c: Cluster, state: State, request: Array) -> State:
    context = get(state.context, request)
    prompt = get(state.prompt, request)
    tier = jnp.int32(0)
    if c.shape.tiers > 1:
        tier = jnp.sum(prompt >= c.scenario.tier_edges).astype(jnp.int32)
    following, head, tail = push_back(
        state.following, state.tier_head, state.tier_tail, tier, request
    )
    cost = queries.predicted_ticks(c, prompt - context, context)
    state = state.replace(
        following=following,
        tier_head=head,
        tier_tail=tail,
        demand=add(state.demand, cost, tier),
        queued=add(state.queued, cost, tier),
        place_pending=jnp.asarray(True),
    )
    return autoscale.wait(state, request, 1)


# Phase 5


def place(c: Cluster, state: State) -> State:
    """One placement, or the end of phase 5 for this tick."""
    if c.shape.tiers > 1:
        state = tiers.retier(c, state)
    state, tier, engine = _first_placement(c, state)
    return either(
        engine < c.shape.engines,
        lambda s: _assign(c, s, tier, engine),
        lambda s: s.replace(place_pending=jnp.asarray(False)),
        state,
        c.zero,
    )


def _first_placement(c: Cluster, state: State) -> tuple[State, Array, Array]:
    """(state, lowest tier whose head is taken, the engine that takes it, or M)."""
    nobody, no_engine = c.shape.requests, jnp.int32(c.shape.engines)

    def look(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, tier, _ = carry
        tier = tier + 1
        head = get(state.tier_head, tier)
        start = (state, no_engine)
        state, engine = when(head != nobody, lambda x: _choose(c, x[0], head, tier), start, c.zero)
        return state, tier, engine

    if c.shape.tiers == 1:
        return look((state, jnp.int32(-1), no_engine))
    return while_loop(
        lambda x: (x[1] + 1 < c.shape.tiers) & (x[2] == no_engine),
        look,
        (state, jnp.int32(-1), no_engine),
        c.zero,
    )


def _choose(c: Cluster, state: State, request: Array, tier: Array) -> tuple[State, Array]:
    state, view, asked = _views(c, state, request, tier)
    policy = policies.pull if c.shape.pull else c.shape.prefill_policy
    assert policy is not None
    return state, jnp.asarray(policy(view, asked, c.scenario.policy), jnp.int32)


def _views(
    c: Cluster, state: State, request: Array, tier: Array
) -> tuple[State, PrefillView, RequestView]:
    eligible = queries.takes_prompts(c, state)
    if c.shape.tiers > 1:
        eligible = eligible & (state.tier == tier)
    prompt = get(state.prompt, request)
    hits = jnp.full(c.shape.engines, get(state.context, request))
    cached = jnp.zeros(c.shape.engines, jnp.int64)
    if c.shape.cache_scope == "local":
        state, nodes = cache.deepest_matches(c, state, get(c.workload.match_node, request))
        hits = jax.vmap(lambda m, n: _hit(c, state, m, n)[1])(jnp.arange(c.shape.engines), nodes)
        cached = state.used * c.scenario.block_tokens
    costs = queries.predicted_ticks(c, prompt - hits, hits)
    per_engine = (c.shape.engines, c.shape.ranks)
    kv = jnp.sum(
        (queries.kv_tokens(c, state) // c.scenario.block_tokens).reshape(per_engine), axis=1
    )
    view = PrefillView(
        eligible=eligible,
        quota_used=state.quota_used,
        quota_cap=c.scenario.tier_quota[state.tier],
        requests=state.prompts,
        tokens=state.prompt_tokens,
        reading_tokens=state.reading_tokens,
        decode_requests=jnp.sum(state.rows.reshape(per_engine), axis=1),
        decode_blocks=kv,
        hit_tokens=hits,
        hit_cost=costs,
        cached_tokens=cached,
    )
    shared = hits[0] if c.shape.cache_scope == "shared" else jnp.zeros_like(prompt)
    worst = jnp.asarray(2**62, costs.dtype)
    asked = RequestView(
        index=request,
        decisions=state.placements,
        draw=queries.policy_draw(c, request),
        input_tokens=prompt,
        context_tokens=prompt,
        cost=jnp.min(jnp.where(eligible, costs, worst)),
        shared_hit_tokens=shared,
    )
    return state, view, asked


def _assign(c: Cluster, state: State, tier: Array, engine: Array) -> State:
    request = get(state.tier_head, tier)
    cost = queries.owed_quota(c, state, request)
    state = autoscale.wait(state, request, -1)
    state = state.replace(
        queued=add(state.queued, -cost, tier),
        tier_head=pop_front(state.following, state.tier_head, tier),
        placements=state.placements + 1,
        pulled=put(state.pulled, state.now, request),
        engine=put(state.engine, engine, request),
    )
    if c.shape.cache_scope != "none":
        state = _settle_hit(c, state, engine, request)
    context = get(state.context, request)
    new = get(state.prompt, request) - context
    state = prefill.debit(c, state, engine, request)
    state = state.replace(
        prompts=add(state.prompts, 1, engine),
        prompt_tokens=add(state.prompt_tokens, new, engine),
    )
    state = move(state, request, FETCHING)
    if c.shape.cache_scope != "shared":
        return prefill.enqueue(
            c, state.replace(fetched=put(state.fetched, state.now, request)), request
        )
    return _fetch(c, state, engine, request)


def _settle_hit(c: Cluster, state: State, engine: Array, request: Array) -> State:
    """The hit that counts: the engine's own cache, or the shared store's SWA read again."""
    store = cache.cache_of(c.shape, engine)
    if c.shape.storage_nodes:
        state = _read_again(c, state, store, request)
    if c.shape.cache_scope == "local":
        state, node = cache.deepest_match(c, state, store, get(c.workload.match_node, request))
        state = _record_hit(state, request, node, *_hit(c, state, store, node))
        state = retention.touch(c, state, store, node, request)
    if not c.shape.swa:
        return state
    node = get(state.hit_node, request)
    tokens = get(state.hit_compute, request)
    block = c.scenario.block_tokens.astype(jnp.int32)
    whole = (tokens > 0) & (tokens == get(state.hit_blocks, request) * block)
    live = whole & (state.now < get(state.anchor_expiry, store, node))
    tokens = jnp.where(whole & ~live, jnp.maximum(tokens - block, 0), tokens)
    state = state.replace(
        hit_compute=put(state.hit_compute, tokens, request),
        context=put(state.context, tokens, request),
        anchored=put(state.anchored, live, request),
    )
    return cache.renew_anchor(c, state, store, node, live)


def _read_again(c: Cluster, state: State, store: Array, request: Array) -> State:
    """What was matched, up to what storage nodes can still give; the rest is unpinned."""
    node, blocks = get(state.hit_node, request), get(state.hit_blocks, request)
    state, deepest, left = storage.readable_prefix(c, state, node, blocks)

    def shorten(state: State) -> State:
        tokens = _usable(c, state, store, deepest, left)
        state = cache.pin(c, state, node, -1)
        return cache.pin(c, _record_hit(state, request, deepest, left, tokens), deepest, 1)

    return when(left < blocks, shorten, state, c.zero)


def _fetch(c: Cluster, state: State, engine: Array, request: Array) -> State:
    """Starts the fetch of what the hit needs; ends it at once when that takes no time."""
    blocks = get(state.hit_blocks, request).astype(jnp.int64)
    block_bytes = blocks * c.scenario.block_bytes
    state_bytes = jnp.int64(0)
    if c.shape.swa:
        remote = get(state.anchor_host, 0, get(state.hit_node, request)) != engine
        needed = get(state.anchored, request) & remote
        state_bytes = jnp.where(needed, c.scenario.swa_bytes, 0)
    busy = ceil_ticks(block_bytes * c.scenario.fetch_rate + state_bytes * c.scenario.swa_rate)
    state = state.replace(
        fetched_bytes=state.fetched_bytes + block_bytes,
        swa_fetched_bytes=state.swa_fetched_bytes + state_bytes,
        reading_tokens=add(state.reading_tokens, blocks * c.scenario.block_tokens, engine),
    )
    if not c.shape.fetches:
        return end_fetch(c, state, request)
    moves = block_bytes + state_bytes > 0
    free = state.now + busy
    if c.shape.fetch_fifo:
        free = jnp.maximum(state.now, get(state.fetch_free, engine)) + busy
        kept = get(state.fetch_free, engine)
        state = state.replace(
            fetch_free=put(state.fetch_free, jnp.where(moves, free, kept), engine)
        )
    if c.shape.storage_reads:
        state, read = storage.read(c, state, request)
        free = jnp.maximum(free, read)
    end = free + c.scenario.fetch_ticks
    # A fetch that takes no time ends before the next placement either way.
    return schedule(c, state, jnp.where(moves, end, state.now), request, FETCH)


def end_fetch(c: Cluster, state: State, request: Array) -> State:
    """The prefix of `request` is on its engine: release the pins and queue the prompt."""
    blocks = get(state.hit_blocks, request).astype(jnp.int64)
    engine = get(state.engine, request)
    state = state.replace(
        fetched=put(state.fetched, state.now, request),
        reading_tokens=add(state.reading_tokens, -blocks * c.scenario.block_tokens, engine),
    )
    state = cache.pin(c, state, get(state.hit_node, request), -1)
    return prefill.enqueue(c, state, request)
