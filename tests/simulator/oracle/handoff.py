"""Section 7: the choice of a decode rank, blocks reserved there, and the transfer."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import Mode
from tests.simulator.oracle import policies
from tests.simulator.oracle.clock import HAND_OFF, TRANSFER_END, ceil_divide, ceil_ticks
from tests.simulator.oracle.steps import draw
from tests.simulator.oracle.world import UNITS, Engine, Rank, Request, World


def view(world: World, request: Request) -> policies.DecodeSide:
    """What the decode policy sees of every rank."""
    side = policies.DecodeSide([], [], [], [], [])
    blocks = world.admission_blocks(request)
    for engine in world.engines:
        for rank in engine.ranks:
            others = sum(r.prompt for r in rank.assigned if r not in rank.running)
            serves = engine.mode == Mode.COMPLETION and engine.life == "serving"
            side.eligible.append(serves and rank.alive)
            side.room.append(
                len(rank.assigned) < world.cluster.slots
                and not rank.waiting
                and world.fits(rank, blocks)
            )
            side.requests.append(len(rank.assigned))
            side.tokens.append(world.held(rank) // UNITS + others)
            side.group.append(engine.index)
    return side


def choose(world: World, request: Request, groups: dict[int, list[Request]] | None = None) -> None:
    """At the end of a PROMPT engine's step: a rank, then blocks or the wait for them.

    Of a departing engine, those that fit at once join the group of their destination.
    """
    if request.source < 0:
        request.source = request.engine
    asked = policies.Asked(
        world.handoffs, draw(world.cluster.seed, request.index), request.prompt + 1
    )
    side = view(world, request)
    chosen = policies.decode(world.cluster.decode_policy, side, asked, world.cluster.policy)
    if chosen is None:
        world.orphans.append(request)
        return
    world.handoffs += 1
    engine = world.engines[chosen // world.cluster.ranks]
    rank = engine.ranks[chosen % world.cluster.ranks]
    request.decode_engine, request.decode_rank = engine.index, rank.index
    rank.assigned.append(request)
    blocks = world.admission_blocks(request)
    if groups is not None and not rank.waiting and world.fits(rank, blocks):
        rank.reservations[request.index] = blocks
        groups.setdefault(engine.index, []).append(request)
        return
    rank.waiting.append(request)
    serve_waiting(world, rank)


def serve_waiting(world: World, rank: Rank) -> None:
    """Heads that fit reserve and start; nobody overtakes."""
    while rank.waiting and world.fits(rank, world.admission_blocks(rank.waiting[0])):
        request = rank.waiting.popleft()
        rank.reservations[request.index] = world.admission_blocks(request)
        transfer(world, [request], world.engines[request.source])


def transfer(world: World, requests: list[Request], sender: Engine) -> None:
    """One transfer over the link of the sending engine; always ends in phase 1."""
    cluster, size = world.cluster, 0
    for request in requests:
        blocks = ceil_divide(request.prompt, cluster.block_tokens)
        request.handoff_bytes += blocks * cluster.block_bytes + cluster.live_bytes
        size += blocks * cluster.block_bytes + cluster.live_bytes
    busy = ceil_ticks(size * cluster.handoff_femtoseconds_per_byte)
    sender.bytes["handoff"] += size
    sent = world.now + busy
    if cluster.handoff_link == "fifo":
        sent = sender.handoff_free = max(world.now, sender.handoff_free) + busy
    for request in requests:
        index = (request.index, HAND_OFF)
        world.agenda.add(sent + cluster.handoff_ticks, TRANSFER_END, index, request)


def handed_off(world: World, request: Request) -> None:
    """Phase 1: the request waits for a slot at its rank."""
    engine = world.engines[request.decode_engine]
    world.log(TRANSFER_END, "handed_off", engine.index, request.index)
    request.at["handed_off"] = world.now
    request.source = -1
    engine.ranks[request.decode_rank].joins.append(request)
    engine.dirty = True
