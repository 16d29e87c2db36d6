"""Phases 0 and 6: the end of a step, and the next batch by the engine's mode (sections 6 and 8)."""

from __future__ import annotations

from deepinfer_jax.simulator.cluster import Mode
from tests.simulator.oracle import decode, prefill
from tests.simulator.oracle.clock import FORMATION, STEP_END
from tests.simulator.oracle.world import Engine, World


def end_step(world: World, engine: Engine) -> None:
    """Decode rows first, then chunks."""
    step = engine.step
    assert step is not None
    world.log(STEP_END, "step_end", engine.index)
    engine.step = None
    engine.dirty = True
    engine.counts[step.kind] += 1
    engine.busy += world.now - step.start
    decode.end_rows(world, engine, step.rows)
    prefill.end_chunks(world, engine, step.chunks)


def form(world: World, engine: Engine) -> None:
    """A formation that finds nothing to run leaves the engine idle."""
    world.log(FORMATION, "form", engine.index)
    engine.dirty = False
    started = {
        Mode.PROMPT: prompt,
        Mode.COMPLETION: completion,
        Mode.NORMAL: normal,
        Mode.MIXED: mixed,
    }[engine.mode](world, engine)
    if not started:
        engine.idle = True


def prompt(world: World, engine: Engine) -> bool:
    """PROMPT: prefill whatever is queued."""
    return prefill.start_prompt(
        world, engine, [prefill.form_batch(world, rank) for rank in engine.ranks]
    )


def completion(world: World, engine: Engine) -> bool:
    """COMPLETION: preemption, joins, a step."""
    decode.preempt(world, engine)
    decode.take_joins(world, engine)
    return decode.start_decode(world, engine)


def mixed(world: World, engine: Engine) -> bool:
    """MIXED: preemption, then chunks beside the rows."""
    decode.preempt(world, engine)
    batches = [prefill.form_batch(world, rank) for rank in engine.ranks]
    return prefill.start_mixed(world, engine, batches) or decode.start_decode(world, engine)


def normal(world: World, engine: Engine) -> bool:
    """NORMAL: the vote between a prompt step and a decode step."""
    decode.preempt(world, engine)
    wants = prompt_vote(world, engine)
    if any(wants):
        batches = [
            prefill.form_batch(world, rank) if want else []
            for rank, want in zip(engine.ranks, wants, strict=True)
        ]
        if prefill.start_prompt(world, engine, batches):
            engine.decode_steps = 0
            return True
    if not decode.start_decode(world, engine):
        return False
    engine.decode_steps += 1
    return True


def prompt_vote(world: World, engine: Engine) -> list[bool]:
    """The ranks that may form prefill batches now."""
    cluster, d = world.cluster, engine.decode_steps
    if not any(rank.running for rank in engine.ranks):
        return [bool(rank.fifo) for rank in engine.ranks]
    numerator, denominator = cluster.prompt_usage_limit
    wants = [
        bool(rank.fifo)
        and (
            cluster.kv_blocks is None
            or world.used_blocks(rank) * denominator <= numerator * cluster.kv_blocks
        )
        for rank in engine.ranks
    ]
    if d != 0 and d % cluster.prompt_any_interval == 0:
        return wants
    asked = [want for want, rank in zip(wants, engine.ranks, strict=True) if rank.alive]
    if d % cluster.prompt_interval == 0 and all(asked):
        return wants
    return [False] * len(wants)
