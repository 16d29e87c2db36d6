"""Sections 3 and 5: the match, tiers, pull and route, placement and fetch."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import FOREVER, Status
from tests.simulator.oracle import policies, retention, steps, storage
from tests.simulator.oracle.cache import ROOT, Cache
from tests.simulator.oracle.clock import (
    FETCH,
    MATCH_END,
    ROUND,
    ROUTE,
    TIER_ROUND,
    TRANSFER_END,
    ceil_divide,
    ceil_ticks,
)
from tests.simulator.oracle.world import UNITS, Engine, Request, World


def hit(world: World, cache: Cache, request: Request) -> tuple[int, int, int]:
    """(L1, H, deepest matched segment) of a request in one cache, now."""
    block = world.cluster.block_tokens
    blocks, deepest = cache.match(request.match_node)
    if world.cluster.storage_nodes:
        blocks, deepest = storage.readable(world, request, blocks, deepest)
    block_hit = block * blocks
    if not world.cluster.swa or cache.live_anchor(request.match_node, blocks, world.now):
        return block_hit, block_hit, deepest
    return block_hit, max(0, block_hit - block), deepest


def predicted(world: World, request: Request, compute_hit: int) -> int:
    """Quota ticks of a prompt that restarts at `compute_hit`."""
    return steps.predicted(world.cluster.cost, request.prompt - compute_hit, compute_hit)


def match(world: World, request: Request) -> None:
    """Phase 4."""
    cluster = world.cluster
    world.log(MATCH_END, "match", -1, request.index)
    request.at["matched"] = world.now
    request.matches += 1
    if request.matches == 1:
        status = refused(world, request)
        if status is not None:
            return world.end(request, status)
    request.prompt = request.input_tokens + request.emitted
    request.block_hit = request.hit = 0
    if cluster.cache_scope == "shared":
        cache = world.caches[0]
        request.block_hit, request.hit, request.pinned = hit(world, cache, request)
        retention.use(world, cache, request.pinned, request)
        cache.touch(request.pinned)
        cache.pin(request.pinned)
    request.cost = predicted(world, request, request.hit)
    tier = 0
    if cluster.prefill_policy == "pull":
        tier = sum(edge <= request.prompt for edge in cluster.tier_edges)
        world.demand[tier] += request.cost
    world.fifos[tier].append(request)
    world.demand_tokens += request.prompt - request.hit
    world.route = True
    return None


def refused(world: World, request: Request) -> Status | None:
    """Requests that can never be served."""
    cluster = world.cluster
    if request.input_tokens > cluster.max_input_tokens:
        return Status.TOO_LONG
    tokens = request.input_tokens + request.output_tokens + cluster.nextn
    blocks = ceil_divide(tokens, cluster.block_tokens)
    if cluster.kv_blocks is not None and blocks > cluster.kv_blocks:
        return Status.DOES_NOT_FIT
    return None


def has_tiers(world: World) -> bool:
    """Whether engines move between tiers."""
    return world.cluster.prefill_policy == "pull" and world.cluster.tiers > 1


def deal_tiers(world: World) -> None:
    """Time zero: engines that take prompts, dealt in ascending order; the first round is set."""
    if not has_tiers(world):
        return
    cluster = world.cluster
    engines = [e for e in world.engines if e.takes_prompts]
    each, more = divmod(len(engines), cluster.tiers)
    world.targets = list(cluster.tier_engines) or [each + (t < more) for t in range(cluster.tiers)]
    assert sum(world.targets) == len(engines)
    tiers = [t for t, count in enumerate(world.targets) for _ in range(count)]
    for engine, tier in zip(engines, tiers, strict=True):
        engine.tier = tier
    if cluster.tier_round_ticks < FOREVER:
        world.agenda.add(cluster.tier_round_ticks, ROUND, (TIER_ROUND,))


def tier_round(world: World) -> None:
    """Phase 3."""
    world.log(ROUND, "tier_round")
    if any(world.demand):
        engines = sum(e.takes_prompts for e in world.engines)
        world.targets = policies.tier_shares(world.demand, engines)
    world.demand = [sum(r.cost for r in fifo) for fifo in world.fifos]
    world.lonely_rounds += world.nothing_to_come()
    world.route = True
    world.agenda.add(world.now + world.cluster.tier_round_ticks, ROUND, (TIER_ROUND,))


def adjust_tiers(world: World) -> None:
    """Drained engines move from tiers above their target to the lowest tier below its own."""
    while True:
        engines = [e for e in world.engines if e.takes_prompts]
        have = [sum(e.tier == t for e in engines) for t in range(world.cluster.tiers)]
        lacking = [t for t, n in enumerate(have) if n < world.targets[t]]
        movable = [e for e in engines if e.quota == 0 and have[e.tier] > world.targets[e.tier]]
        if not lacking or not movable:
            return
        movable[0].tier = lacking[0]


def route_one(world: World) -> None:
    """Phase 5: one placement; the phase stays wanted until none is possible."""
    if has_tiers(world):
        adjust_tiers(world)
    for tier, fifo in enumerate(world.fifos):
        if not fifo:
            continue
        if world.cluster.prefill_policy == "pull":
            engine = pull(world, tier, fifo[0])
        else:
            engine = chosen(world, fifo[0])
        if engine is not None:
            return place(world, fifo.popleft(), engine)
    world.route = False
    return None


def pull(world: World, tier: int, request: Request) -> Engine | None:
    """The tier's engine with most remaining quota, if the head fits there."""
    engines = [e for e in world.engines if e.takes_prompts and e.tier == tier]
    if not engines:
        return None
    cap = world.cluster.tier_quota[tier]
    engine = max(engines, key=lambda e: (cap - e.quota, -e.index))
    cost = request.cost
    if world.cluster.cache_scope == "local":
        cost = predicted(world, request, hit(world, world.caches[engine.index], request)[1])
    return engine if engine.quota + cost <= cap or engine.quota == 0 else None


def chosen(world: World, request: Request) -> Engine | None:
    """Any other policy, through its view."""
    side = view(world, request)
    if not any(side.eligible):
        return None
    asked = policies.Asked(
        decisions=world.placements,
        draw=steps.draw(world.cluster.seed, request.index),
        tokens=request.prompt,
        cost=min(c for c, yes in zip(side.hit_cost, side.eligible, strict=True) if yes),
    )
    cluster = world.cluster
    engine = policies.prefill(cluster.prefill_policy, side, asked, cluster.policy)
    return None if engine is None else world.engines[engine]


def view(world: World, request: Request) -> policies.PrefillSide:
    """What a prefill policy sees of every engine."""
    side = policies.PrefillSide(*([] for _ in range(10)))
    block = world.cluster.block_tokens
    for engine in world.engines:
        compute_hit, cached = request.hit, 0
        if world.cluster.cache_scope == "local":
            cache = world.caches[engine.index]
            compute_hit, cached = hit(world, cache, request)[1], block * cache.used()
        side.eligible.append(engine.takes_prompts)
        side.quota_used.append(engine.quota)
        side.requests.append(len(engine.placed))
        side.tokens.append(sum(r.remaining for r in engine.placed))
        side.reading_tokens.append(sum(r.block_hit for r in engine.placed if r.fetching))
        side.decode_requests.append(sum(len(rank.running) for rank in engine.ranks))
        side.decode_blocks.append(sum(world.held(rank) // UNITS // block for rank in engine.ranks))
        side.hit_tokens.append(compute_hit)
        side.hit_cost.append(predicted(world, request, compute_hit))
        side.cached_tokens.append(cached)
    return side


def place(world: World, request: Request, engine: Engine) -> None:
    """The placement of one request, in the order of section 5."""
    cluster, cache = world.cluster, world.cache_of(engine.index)
    block = cluster.block_tokens
    world.log(ROUTE, "place", engine.index, request.index)
    request.at["pulled"] = world.now
    world.placements += 1
    if cluster.cache_scope == "local":
        assert cache is not None
        request.block_hit, request.hit, deepest = hit(world, cache, request)
        retention.use(world, cache, deepest, request)
        cache.touch(deepest)
    if cache is not None and cluster.storage_nodes and cluster.cache_scope == "shared":
        read_again(world, cache, request)
    anchor = None
    if cache is not None and cluster.swa and request.hit == request.block_hit > 0:
        anchor = cache.live_anchor(request.match_node, request.block_hit // block, world.now)
        if anchor is None:
            request.hit = request.block_hit - block
        else:
            cache.renew(anchor, world.now)
    request.cost = predicted(world, request, request.hit)
    request.remaining, request.context = request.prompt - request.hit, request.hit
    request.chunked = False
    rank = min((r for r in engine.ranks if r.alive), key=lambda r: (r.quota, r.index))
    request.engine, request.rank = engine.index, rank.index
    rank.quota += request.cost
    engine.quota += request.cost
    engine.placed.append(request)
    far = anchor is not None and anchor.host != engine.index
    fetch(world, request, engine, swa_bytes=cluster.swa_bytes if far else 0)


def read_again(world: World, cache: Cache, request: Request) -> None:
    """What was matched may be longer than what can be read now."""
    block = world.cluster.block_tokens
    matched = request.block_hit // block
    blocks, deepest = storage.readable(world, request, matched, request.pinned)
    if blocks == matched:
        return
    cache.unpin(request.pinned)
    cache.pin(deepest)
    request.pinned, request.block_hit, request.hit = deepest, block * blocks, block * blocks
    if world.cluster.swa and not cache.live_anchor(request.match_node, blocks, world.now):
        request.hit = max(0, request.block_hit - block)


def fetch(world: World, request: Request, engine: Engine, swa_bytes: int) -> None:
    """Blocks from the shared store and a remote sliding-window state over the engine's link."""
    cluster = world.cluster
    blocks = request.block_hit // cluster.block_tokens if cluster.cache_scope == "shared" else 0
    block_bytes = blocks * cluster.block_bytes
    request.fetching = True
    request.fetched_bytes += block_bytes
    request.swa_bytes += swa_bytes
    engine.bytes["fetch"] += block_bytes
    engine.bytes["swa"] += swa_bytes
    busy = ceil_ticks(
        block_bytes * cluster.fetch_femtoseconds_per_byte
        + swa_bytes * cluster.swa_femtoseconds_per_byte
    )
    end = world.now
    if block_bytes + swa_bytes > 0:
        end = world.now + busy
        if cluster.fetch_link == "fifo":
            end = engine.fetch_free = max(world.now, engine.fetch_free) + busy
        if cluster.storage_reads:
            end = max(end, storage.read(world, request))
        end += cluster.fetch_ticks
    if end == world.now:
        fetched(world, request)
    else:
        world.agenda.add(end, TRANSFER_END, (request.index, FETCH), request)


def fetched(world: World, request: Request) -> None:
    """Phase 1, or inside the placement: pins are released, the prompt queues at its rank."""
    world.log(TRANSFER_END, "fetched", request.engine, request.index)
    if request.pinned != ROOT:
        world.caches[0].unpin(request.pinned)
        request.pinned = ROOT
    request.fetching = False
    request.at["fetched"] = world.now
    engine = world.engines[request.engine]
    engine.ranks[request.rank].fifo.append(request)
    engine.dirty = True
