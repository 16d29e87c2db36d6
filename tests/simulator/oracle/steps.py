"""The arithmetic of sections 3, 6 and 8: work, predicted cost, step times, accepted drafts."""

from __future__ import annotations

from typing import Any

from tests.simulator.oracle.clock import SUBS_PER_FEMTOSECOND, ceil_ticks

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def work(cost: Any, q: int, c: int) -> int:
    """Femtoseconds of q new tokens over c tokens of context: every pair counted once."""
    pairs = c * q + q * (q + 1) // 2
    linear = int(cost.prefill_token) * q + int(cost.prefill_context) * c
    return linear + int(cost.prefill_pair) * pairs


def predicted(cost: Any, q: int, c: int) -> int:
    """Quota ticks of the rest of a prompt; nothing left costs nothing."""
    return max(1, ceil_ticks(work(cost, q, c))) if q > 0 else 0


def prefill_part(cost: Any, chunks: list[tuple[int, int]]) -> int:
    """Femtoseconds of one rank's batch of (q', c); 0 without one."""
    if not chunks:
        return 0
    return int(cost.prefill_base) + sum(work(cost, q, c) for q, c in chunks)


def prefill_exchange(cost: Any, tokens: int) -> int:
    """Femtoseconds of the expert exchange of a prompt step."""
    return int(cost.prefill_exchange_base) + int(cost.prefill_exchange_token) * tokens


def decode_part(cost: Any, rows: int, kv: int) -> int:
    """Subs of one rank's decode rows that hold `kv` 1/256 tokens; 0 without rows."""
    if rows == 0:
        return 0
    return max(
        SUBS_PER_FEMTOSECOND * (int(a) + int(b) * rows) + int(c) * kv
        for a, b, c in cost.decode_forms
    )


def decode_exchange(cost: Any, rows: int) -> int:
    """Femtoseconds of the expert exchange of a decode step."""
    return int(cost.decode_exchange_base) + int(cost.decode_exchange_row) * rows


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream(seed: int, request: int) -> int:
    """The request's key."""
    return mix(mix((seed + GOLDEN * (request + 1)) & MASK))


def draw(seed: int, request: int) -> int:
    """31 bits for policies."""
    return stream(seed, request) >> 33


def accepted(cluster: Any, request: int, step: int) -> int:
    """Drafts accepted in a request's step, counted from 0 over its whole life."""
    key = mix((cluster.seed + GOLDEN * (request + 1)) & MASK)
    u = mix((key + GOLDEN * (step + 1)) & MASK) >> 11
    survival, count = 1.0, 0
    for probability in cluster.acceptance[: cluster.nextn]:
        survival *= probability
        count += u < int(survival * 2.0**53)
    return count


def steps_needed(cluster: Any, request: int, life: int, owed: int) -> int:
    """Steps until `owed` more tokens are committed, by a request that ran `life` steps before."""
    if cluster.nextn == 0:
        return owed
    sent, steps = 0, 0
    while sent < owed:
        sent += 1 + accepted(cluster, request, life + steps)
        steps += 1
    return steps
