"""Section 6: prefill batches, prompt steps and what happens when a chunk ends."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import Mode
from tests.simulator.oracle import decode, handoff, retention, steps
from tests.simulator.oracle.clock import STEP_END, SUBS_PER_FEMTOSECOND, TRANSFER_END, WRITE_BACK
from tests.simulator.oracle.world import Engine, Rank, Request, World

Batch = list[tuple[Request, int]]


def largest_chunk(world: World, request: Request, time: int, tokens: int) -> int:
    """The most new tokens that keep the batch within its quota and token limit."""
    cluster = world.cluster
    for q in range(request.remaining, 0, -1):
        within = time + steps.work(cluster.cost, q, request.context) <= cluster.step_quota
        if within and tokens + q <= cluster.batch_tokens:
            return q
    return 0


def admit(world: World, rank: Rank, request: Request) -> bool:
    """NORMAL, MIXED: a slot and blocks, taken when the request first enters a batch."""
    if rank.engine.mode == Mode.PROMPT or request in rank.admitted:
        return True
    blocks = world.admission_blocks(request)
    if len(rank.running) + len(rank.admitted) >= world.cluster.slots:
        return False
    if not world.fits(rank, blocks):
        return False
    rank.admitted.append(request)
    rank.reservations[request.index] = blocks
    return True


def form_batch(world: World, rank: Rank) -> Batch:
    """The FIFO's prefix that fits; the last one may be cut short."""
    cluster = world.cluster
    rows = len(rank.running) if rank.engine.mode == Mode.MIXED else 0
    time, tokens = int(cluster.cost.prefill_base), rows * (1 + cluster.nextn)
    batch: Batch = []
    for request in rank.fifo:
        if len(batch) == cluster.batch_requests:
            break
        q = largest_chunk(world, request, time, tokens)
        if q < request.remaining:
            q -= q % cluster.chunk_multiple
        if q == 0:
            if batch or rows:
                break
            q = min(request.remaining, cluster.chunk_multiple)
        if not admit(world, rank, request):
            break
        batch.append((request, q))
        time += steps.work(cluster.cost, q, request.context)
        tokens += q
        if q < request.remaining:
            break
    return batch


def rank_work(world: World, batch: Batch) -> int:
    """Femtoseconds of one rank's batch."""
    return steps.prefill_part(world.cluster.cost, [(q, r.context) for r, q in batch])


def start_prompt(world: World, engine: Engine, batches: list[Batch]) -> bool:
    """Start a prompt step if any rank has a chunk."""
    if not any(batches):
        return False
    tokens = sum(q for batch in batches for _, q in batch)
    femtoseconds = max(rank_work(world, batch) for batch in batches)
    femtoseconds += steps.prefill_exchange(world.cluster.cost, tokens)
    rows: list[list[Request]] = [[] for _ in batches]
    world.start_step(engine, "prefill", SUBS_PER_FEMTOSECOND * femtoseconds, batches, rows)
    return True


def start_mixed(world: World, engine: Engine, batches: list[Batch]) -> bool:
    """MIXED, with a chunk anywhere: decode rows and chunks of a rank run one after the other."""
    if not any(batches):
        return False
    cost, rows = world.cluster.cost, decode.rows_of(engine)
    slowest = max(
        steps.decode_part(cost, len(rank.running), world.held(rank))
        + SUBS_PER_FEMTOSECOND * rank_work(world, batch)
        for rank, batch in zip(engine.ranks, batches, strict=True)
    )
    exchange = steps.prefill_exchange(cost, sum(q for batch in batches for _, q in batch))
    if any(rows):
        exchange += steps.decode_exchange(cost, sum(map(len, rows)))
    world.start_step(engine, "mixed", slowest + SUBS_PER_FEMTOSECOND * exchange, batches, rows)
    return True


def end_chunks(world: World, engine: Engine, chunks: list[Batch]) -> None:
    """Ranks ascending, requests in batch order."""
    for rank, batch in zip(engine.ranks, chunks, strict=True):
        for request, q in batch:
            end_chunk(world, rank, request, q)


def end_chunk(world: World, rank: Rank, request: Request, q: int) -> None:
    """Credit the quota, anchor the chunk's end, and end the prompt if nothing is left."""
    cost, r, c = world.cluster.cost, request.remaining, request.context
    credit = steps.predicted(cost, r, c) - steps.predicted(cost, r - q, c + q)
    rank.quota -= credit
    rank.engine.quota -= credit
    world.route = True
    request.remaining, request.context = r - q, c + q
    anchor_chunk(world, request)
    if request.remaining == 0:
        end_prompt(world, rank, request)


def anchor_chunk(world: World, request: Request) -> None:
    """`every_chunk`: one at the chunk's end if a segment ends there."""
    cluster, cache = world.cluster, world.cache_of(request.engine)
    if cache is None or not cluster.swa or cluster.swa_anchors != "every_chunk":
        return
    blocks, rest = divmod(request.context, cluster.block_tokens)
    segment = world.trie.ending_at(request.match_node, blocks)
    if rest == 0 and segment is not None:
        cache.write_anchor(segment, request.engine, world.now)


def end_prompt(world: World, rank: Rank, request: Request) -> None:
    """One token is sent, the prompt is published, and decode begins somewhere."""
    engine = rank.engine
    world.log(STEP_END, "prompt_end", engine.index, request.index)
    assert rank.fifo[0] is request
    rank.fifo.popleft()
    engine.placed.remove(request)
    if request.at["first_token"] < 0:
        request.at["first_token"] = world.now
    request.emitted += 1
    request.tokens.append(world.now)
    publish_prompt(world, request)
    if request in rank.admitted:
        rank.admitted.remove(request)
    if request.emitted == request.output_tokens:
        rank.reservations.pop(request.index, None)
        decode.finish(world, request, engine.index)
    elif engine.mode == Mode.PROMPT:
        handoff.choose(world, request)
    else:
        decode.join(world, rank, request)


def publish_prompt(world: World, request: Request) -> None:
    """Blocks now or after the write-back, the prompt's anchor now."""
    cluster, cache = world.cluster, world.cache_of(request.engine)
    if cache is None:
        return
    if cluster.write_back_ticks == 0:
        retention.use(world, cache, request.publish_node, request)
        cache.publish(request.publish_node)
    else:
        at = world.now + cluster.write_back_ticks
        world.agenda.add(at, TRANSFER_END, (request.index, WRITE_BACK), request)
    segment = world.trie.ending_at(request.match_node, world.capped_blocks(request.input_tokens))
    if cluster.swa and segment is not None:
        cache.write_anchor(segment, request.engine, world.now)


def written_back(world: World, request: Request) -> None:
    """Phase 1: to the shared store or the cache of the engine that prefilled it."""
    world.log(TRANSFER_END, "write_back", request.engine, request.index)
    cache = world.cache_of(request.engine)
    assert cache is not None
    gone = world.engines[request.engine].life in ("off", "starting")
    if world.cluster.cache_scope != "local" or not gone:
        retention.use(world, cache, request.publish_node, request)
        cache.publish(request.publish_node)
