"""Section 11: lives of engines, incidents, crashes, departures and scaling."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.simulator.cluster import FOREVER, Incident, Mode, Pool, Status
from tests.simulator.oracle import decode, handoff
from tests.simulator.oracle.cache import ROOT
from tests.simulator.oracle.clock import (
    DYNAMICS,
    FETCH,
    GRACE_END,
    HAND_OFF,
    INCIDENT,
    MATCH_END,
    ROUND,
    SCALING_ROUND,
    START,
    STEP_END,
    TRANSFER_END,
    ceil_divide,
)
from tests.simulator.oracle.world import Engine, Request, World


def schedule(world: World) -> None:
    """Time zero: the list of incidents, and the first scaling round."""
    for k, (tick, kind, index) in enumerate(world.cluster.incidents):
        world.agenda.add(tick, DYNAMICS, (INCIDENT, k), (kind, index))
    if world.cluster.scaling and world.cluster.scale_round_ticks < FOREVER:
        world.agenda.add(world.cluster.scale_round_ticks, ROUND, (SCALING_ROUND,))


def incident(world: World, what: tuple[int, int]) -> None:
    """One entry of the list."""
    kind, index = what
    cluster = world.cluster
    world.log(DYNAMICS, Incident(kind).name, index)
    if kind == Incident.STORAGE:
        if index < len(world.nodes_up_at):
            world.nodes_up_at[index] = world.now + cluster.storage_repair_ticks
        return
    engine = world.engines[index // cluster.ranks if kind == Incident.GPU else index]
    if kind == Incident.DEPART:
        if engine.life == "serving":
            begin_departure(world, engine)
        elif engine.life == "starting":
            go_off(world, engine)
        return
    if kind == Incident.GPU:
        repaired = world.now + cluster.repair_ticks
        forever = cluster.repair_ticks == FOREVER
        engine.ranks[index % cluster.ranks].healthy_at = FOREVER if forever else repaired
    else:
        lose_anchors(world, engine)
    if engine.life != "off":
        crash(world, engine)


def lose_anchors(world: World, engine: Engine) -> None:
    """Host memory is gone."""
    for cache in world.caches:
        for anchor in cache.anchors.values():
            if anchor.host == engine.index:
                anchor.expiry = min(anchor.expiry, world.now)


def lose_blocks(world: World, engine: Engine) -> None:
    """The engine's own cache is gone."""
    if world.cluster.cache_scope == "local":
        cache = world.caches[engine.index]
        world.counters["lost"] += cache.used()
        cache.present = [0] * len(cache.present)
        cache.least_recent_first.clear()


def go_off(world: World, engine: Engine) -> None:
    """Given back."""
    forget_plans(world, engine)
    engine.enter("off", world.now)
    engine.idle, engine.dirty = True, False
    lose_blocks(world, engine)
    lose_anchors(world, engine)


def forget_plans(world: World, engine: Engine) -> None:
    """No start and no end of a grace to come."""
    plans = ((START, engine.index), (GRACE_END, engine.index))
    world.agenda.remove(lambda phase, index, what: phase == DYNAMICS and index in plans)
    engine.grace_over = False


def healthy(engine: Engine) -> int:
    """When the first rank is healthy."""
    return min(rank.healthy_at for rank in engine.ranks)


def begin_start(world: World, engine: Engine, ticks: int) -> None:
    """Starting, or off when no rank will ever be healthy."""
    forget_plans(world, engine)
    engine.enter("starting", world.now)
    if healthy(engine) == FOREVER:
        go_off(world, engine)
    else:
        at = max(world.now + ticks, healthy(engine))
        world.agenda.add(at, DYNAMICS, (START, engine.index), engine)


def start(world: World, engine: Engine) -> None:
    """Serving, with the healthy ranks."""
    world.log(DYNAMICS, "start", engine.index)
    if world.cluster.prefill_policy == "pull" and world.cluster.tiers > 1 and engine.mode != 1:
        others = [e for e in world.engines if e.takes_prompts]
        have = [sum(e.tier == t for e in others) for t in range(world.cluster.tiers)]
        lacking = [t for t, n in enumerate(have) if n < world.targets[t]]
        engine.tier = lacking[0] if lacking else engine.tier
    engine.enter("serving", world.now)
    for rank in engine.ranks:
        rank.alive = rank.healthy_at <= world.now
    world.route = True
    if engine.mode == Mode.COMPLETION:
        orphans, world.orphans = list(world.orphans), type(world.orphans)()
        for request in orphans:
            handoff.choose(world, request)


def landed(engine: Engine) -> list[Request]:
    """Landed or running there, by index."""
    there = [r for rank in engine.ranks for r in (*rank.joins, *rank.running)]
    return sorted(there, key=lambda r: r.index)


def bound(engine: Engine) -> list[Request]:
    """Waiting for blocks there, or in transfer to it."""
    there = landed(engine)
    coming = [r for rank in engine.ranks for r in rank.assigned if r not in there]
    return sorted(coming, key=lambda r: r.index)


def crash(world: World, engine: Engine) -> None:
    """The whole engine is lost."""
    number = (engine.index,)
    world.agenda.remove(lambda phase, index, what: phase == STEP_END and index == number)
    if engine.step is not None:
        engine.busy += world.now - engine.step.start
        engine.step = None
    engine.idle, engine.dirty, engine.decode_steps = True, False, 0
    engine.fetch_free = engine.handoff_free = 0
    lost = {r.index: r for r in (*engine.placed, *landed(engine))}
    lost |= {r.index: r for r in world.requests if r.source == engine.index}
    redirected = [r for r in bound(engine) if r.index not in lost]
    for i in sorted(lost):
        lose(world, lost[i])
    for request in redirected:
        take_out(world, request)
    empty(engine)
    lose_blocks(world, engine)
    if engine.life == "leaving":
        go_off(world, engine)
    else:
        begin_start(world, engine, world.cluster.restart_ticks)
    for other in world.engines:
        for rank in other.ranks:
            handoff.serve_waiting(world, rank)
    for request in redirected:
        handoff.choose(world, request)


def empty(engine: Engine) -> None:
    """Nobody is there any more; quota is back."""
    engine.quota = 0
    engine.placed.clear()
    for rank in engine.ranks:
        rank.quota = 0
        rank.reservations.clear()
        for queue in (rank.fifo, rank.waiting, rank.joins, rank.admitted, rank.running):
            queue.clear()
        rank.assigned.clear()


def take_out(world: World, request: Request) -> None:
    """The request leaves every queue, and what was on its way for it does not come."""
    for engine in world.engines:
        if request in engine.placed:
            engine.placed.remove(request)
        for rank in engine.ranks:
            for queue in (rank.fifo, rank.admitted, rank.waiting, rank.joins, rank.assigned):
                if request in queue:
                    queue.remove(request)
            if request in rank.running:
                rank.running.remove(request)
            rank.reservations.pop(request.index, None)
    if request in world.orphans:
        world.orphans.remove(request)
    ways = ((request.index, FETCH), (request.index, HAND_OFF))
    world.agenda.remove(lambda phase, index, what: phase == TRANSFER_END and index in ways)


def keep_sent(world: World, request: Request) -> int:
    """Tokens that a running request has sent on a stopped engine; 0 for others."""
    rank = world.engines[request.decode_engine].ranks[request.decode_rank]
    if request.decode_engine < 0 or request not in rank.running:
        return 0
    tokens = decode.sent(request) - request.emitted
    decode.send(world, request, tokens)
    request.emitted += tokens
    return tokens


def lose(world: World, request: Request) -> None:
    """A request of a crashed engine is matched again, or ends."""
    keep_sent(world, request)
    take_out(world, request)
    if request.pinned != ROOT:
        world.caches[0].unpin(request.pinned)
        request.pinned = ROOT
    request.fetching, request.source = False, -1
    request.preemptions += 1
    request.crashes += 1
    if request.crashes > world.cluster.retry_limit:
        world.end(request, Status.CRASHED)
    else:
        at = world.now + world.cluster.match_ticks
        world.agenda.add(at, MATCH_END, (request.index,), request)


def begin_departure(world: World, engine: Engine) -> None:
    """Nothing new from now on."""
    engine.enter("leaving", world.now)
    engine.grace_over = False
    if engine.mode == Mode.COMPLETION:
        at = world.now + world.cluster.grace_ticks
        world.agenda.add(at, DYNAMICS, (GRACE_END, engine.index), engine)


def end_grace(world: World, engine: Engine) -> None:
    """From the next boundary on the engine forwards."""
    world.log(DYNAMICS, "grace_end", engine.index)
    engine.grace_over = True


def ready(world: World, engine: Engine) -> bool:
    """A leaving engine between two steps, with nothing left or with its grace over."""
    if engine.life != "leaving" or engine.step is not None:
        return False
    some = any(rank.running or rank.assigned for rank in engine.ranks)
    if some:
        return engine.grace_over
    return not engine.placed and all(r.source != engine.index for r in world.requests)


def depart(world: World, engine: Engine) -> None:
    """Off, or everything forwarded."""
    world.log(DYNAMICS, "depart", engine.index)
    going, coming = landed(engine), bound(engine)
    if not going and not coming:
        return go_off(world, engine)
    for request in going:
        request.prompt += keep_sent(world, request)
        request.source = engine.index
        world.counters["forwards"] += 1
    for request in (*going, *coming):
        take_out(world, request)
    empty(engine)
    groups: dict[int, list[Request]] = {}
    for request in sorted((*going, *coming), key=lambda r: r.index):
        handoff.choose(world, request, groups if request in going else None)
    for destination in sorted(groups):
        handoff.transfer(world, groups[destination], engine)
    return None


def scaling_round(world: World) -> None:
    """Phase 3."""
    world.log(ROUND, "scaling")
    cluster = world.cluster
    row: list[int] = [world.now]
    world.lonely_rounds += world.nothing_to_come()
    for pool, mode in (
        (cluster.scale_prompt, Mode.PROMPT),
        (cluster.scale_decode, Mode.COMPLETION),
    ):
        row += [-1, -1, -1] if pool is None else scale(world, pool, mode)
    world.scalings.append(tuple(row))
    world.demand_tokens = sum(r.prompt - r.hit for fifo in world.fifos for r in fifo)
    world.agenda.add(world.now + cluster.scale_round_ticks, ROUND, (SCALING_ROUND,))


def scale(world: World, pool: Pool, mode: Mode) -> list[int]:
    """One pool: (current, demand, wanted)."""
    members = [e for e in world.engines if e.mode == mode]
    current = sum(e.life in ("starting", "serving") for e in members)
    demand = world.demand_tokens
    if mode == Mode.COMPLETION:
        demand = sum(len(rank.assigned) for e in members for rank in e.ranks) + len(world.orphans)
    change = ceil_divide(demand, pool.capacity) + pool.spare - current
    change = max(-pool.step_down, min(pool.step_up, change))
    if demand / (pool.capacity * max(current, 1)) > world.cluster.hold_above:
        change = max(change, 0)
    wanted = max(pool.minimum, min(pool.maximum, current + change))
    off = [e for e in members if e.life == "off" and healthy(e) < FOREVER]
    for engine in off[: max(0, wanted - current)]:
        begin_start(world, engine, world.cluster.start_ticks)
    leave: list[Any] = [e for e in members[::-1] if e.life == "starting"]
    leave += [e for e in members[::-1] if e.life == "serving"]
    for engine in leave[: max(0, current - wanted)]:
        if engine.life == "starting":
            go_off(world, engine)
        else:
            begin_departure(world, engine)
    return [current, demand, wanted]
