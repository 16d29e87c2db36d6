"""Section 13: uses of segments, and the sweep that deletes them."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import FOREVER
from tests.simulator.oracle.cache import Cache
from tests.simulator.oracle.clock import ROUND, SWEEP
from tests.simulator.oracle.world import Request, World


def schedule(world: World) -> None:
    """Time zero: the first sweep."""
    if world.cluster.retention_sweep_ticks < FOREVER:
        world.agenda.add(world.cluster.retention_sweep_ticks, ROUND, (SWEEP,), SWEEP)


def use(world: World, cache: Cache, node: int, request: Request) -> None:
    """Before a touch or a publication: every segment on the path is used by the request's class."""
    ttls = world.cluster.retention_ttl_ticks
    ttl = ttls[request.traffic] if ttls else FOREVER
    until = FOREVER if ttl == FOREVER else world.now + ttl
    for segment in cache.trie.path(node):
        if cache.present[segment] == 0:
            cache.uses.pop(segment, None)
        _, expiry, traffic = cache.uses.get(segment, (0, 0, request.traffic))
        cache.uses[segment] = (world.now, max(expiry, until), min(traffic, request.traffic))


def sweep(world: World) -> None:
    """Phase 3."""
    world.log(ROUND, "sweep")
    for cache in world.caches:
        sweep_cache(world, cache)
    world.sweeps += 1
    world.held_at_sweeps += sum(cache.used() for cache in world.caches)
    at = world.now + world.cluster.retention_sweep_ticks
    world.agenda.add(at, ROUND, (SWEEP,), SWEEP)


def sweep_cache(world: World, cache: Cache) -> None:
    """One segment after the other, in the order of the precedence."""
    cluster = world.cluster
    used = cache.used()
    wanted = used - cluster.retention_low_blocks if used > cluster.retention_high_blocks else 0
    segments = [s for s, n in enumerate(cache.present) if n > 0 and cache.pins[s] == 0]
    expired = [s for s in segments if cache.uses[s][1] <= world.now]

    def older(segment: int) -> tuple[int, ...]:
        last, _, traffic = cache.uses[segment]
        by_class = -traffic if cluster.retention_precedence == "class_first" else 0
        return by_class, last, -segment

    if cluster.retention_precedence != "pressure_first":
        for segment in expired:
            wanted -= delete(world, cache, segment, "expired")
    for segment in sorted(segments, key=older):
        if wanted > 0 and cache.present[segment] > 0:
            why = "expired" if segment in expired else "reclaimed"
            wanted -= delete(world, cache, segment, why)
    for segment in expired:
        delete(world, cache, segment, "expired")


def delete(world: World, cache: Cache, segment: int, why: str) -> int:
    """All blocks of a segment go; how many there were."""
    blocks = cache.present[segment]
    cache.present[segment] = 0
    world.counters[why] += blocks
    return blocks
