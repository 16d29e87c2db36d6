"""Section 8: running requests, decode steps, finishes and preemption."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import Mode, Status
from tests.simulator.oracle import retention, steps
from tests.simulator.oracle.clock import FORMATION, MATCH_END, STEP_END, SUBS_PER_FEMTOSECOND
from tests.simulator.oracle.handoff import serve_waiting
from tests.simulator.oracle.world import UNITS, Engine, Rank, Request, World


def join(world: World, rank: Rank, request: Request) -> None:
    """A request takes a slot; its reservation becomes a need."""
    rank.reservations.pop(request.index, None)
    rank.running.append(request)
    assert len(rank.running) + len(rank.admitted) <= world.cluster.slots
    owed = request.output_tokens - request.emitted
    request.needed = steps.steps_needed(world.cluster, request.index, request.life, owed)
    request.growth = UNITS * owed // request.needed
    request.steps = 0
    request.stay = []
    request.decode_engine, request.decode_rank = rank.engine.index, rank.index
    request.at["decode_start"] = world.now
    world.log(FORMATION, "join", rank.engine.index, request.index)


def take_joins(world: World, engine: Engine) -> None:
    """COMPLETION: from the join FIFO while slots are free."""
    for rank in engine.ranks:
        while rank.joins and len(rank.running) < world.cluster.slots:
            join(world, rank, rank.joins.popleft())


def rows_of(engine: Engine) -> list[list[Request]]:
    """Running requests per rank."""
    return [list(rank.running) for rank in engine.ranks]


def start_decode(world: World, engine: Engine) -> bool:
    """Start a decode step if any rank has rows."""
    rows = rows_of(engine)
    if not any(rows):
        return False
    cost = world.cluster.cost
    slowest = max(
        steps.decode_part(cost, len(rank.running), world.held(rank)) for rank in engine.ranks
    )
    exchange = steps.decode_exchange(cost, sum(map(len, rows)))
    subs = slowest + SUBS_PER_FEMTOSECOND * exchange
    world.start_step(engine, "decode", subs, [[] for _ in rows], rows)
    return True


def end_rows(world: World, engine: Engine, rows: list[list[Request]]) -> None:
    """One more step for every row; then those that are done finish."""
    for request in (r for batch in rows for r in batch):
        request.steps += 1
        request.life += 1
        request.stay.append(world.now)
    for rank, batch in zip(engine.ranks, rows, strict=True):
        for request in sorted(batch, key=lambda r: r.index):
            if request.steps == request.needed:
                send(world, request, request.output_tokens - request.emitted)
                request.emitted = request.output_tokens
                leave(world, rank, request)
                finish(world, request, engine.index)


def send(world: World, request: Request, total: int) -> None:
    """Section 10: when each of the `total` tokens of a stay that ends was sent."""
    reached, first = 0, request.life - len(request.stay)
    for k, tick in enumerate(request.stay, 1):
        reached += 1
        if world.cluster.nextn:
            reached += steps.accepted(world.cluster, request.index, first + k - 1)
        due = total if k == len(request.stay) else min(reached, total)
        while request.emitted + due > len(request.tokens):
            request.tokens.append(tick)


def leave(world: World, rank: Rank, request: Request) -> None:
    """Free the slot and the blocks; whoever waits for blocks may start."""
    rank.running.remove(request)
    if request in rank.assigned:
        rank.assigned.remove(request)
    serve_waiting(world, rank)


def finish(world: World, request: Request, engine: int) -> None:
    """The last token was sent: the output is published and anchored (section 4)."""
    world.log(STEP_END, "finish", engine, request.index)
    request.at["finish"] = world.now
    world.end(request, Status.COMPLETED)
    cache, cluster = world.cache_of(engine), world.cluster
    if cache is None:
        return
    if cluster.publish_output:
        retention.use(world, cache, request.output_node, request)
        cache.publish(request.output_node)
    if cluster.swa and cluster.swa_anchors == "output_end":
        blocks = world.capped_blocks(request.input_tokens + request.output_tokens)
        segment = world.trie.ending_at(request.output_node, blocks)
        if segment is not None:
            cache.write_anchor(segment, engine, world.now)


def preempt(world: World, engine: Engine) -> None:
    """At batch formation, per rank, while the blocks in use exceed the limit."""
    limit = world.cluster.kv_blocks
    for rank in engine.ranks:
        while limit is not None and rank.running and world.used_blocks(rank) > limit:
            victim = min(rank.running, key=lambda r: (-sent(r), r.index))
            world.log(FORMATION, "preempt", engine.index, victim.index)
            send(world, victim, sent(victim) - victim.emitted)
            victim.emitted = sent(victim)
            victim.preemptions += 1
            leave(world, rank, victim)
            if engine.mode == Mode.COMPLETION:
                at = world.now + world.cluster.match_ticks
                world.agenda.add(at, MATCH_END, (victim.index,), victim)
            else:
                prefill_again(world, rank, victim)


def sent(request: Request) -> int:
    """Tokens sent by a running request."""
    return request.emitted + request.steps * request.growth // UNITS


def prefill_again(world: World, rank: Rank, request: Request) -> None:
    """NORMAL, MIXED: to the front of the rank's FIFO, behind a head already admitted."""
    request.prompt = request.input_tokens + request.emitted
    request.hit = request.context = 0
    request.remaining = request.prompt
    request.chunked = False
    request.cost = steps.predicted(world.cluster.cost, request.prompt, 0)
    rank.quota += request.cost
    rank.engine.quota += request.cost
    rank.engine.placed.append(request)
    behind_head = bool(rank.fifo) and rank.fifo[0] in rank.admitted
    rank.fifo.insert(int(behind_head), request)
