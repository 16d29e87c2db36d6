"""Integer step-time coefficients: what both the engine's scheduler and the simulator charge for a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

FEMTOSECONDS_PER_SECOND = 10**15
FEMTOSECONDS_PER_TICK = 10**6
TICKS_PER_SECOND = 10**9
"""One tick is one nanosecond. Coefficients are femtoseconds, so that the smallest real ones (V4.1's
index bytes per context token at 8 TB/s: 21 picoseconds) keep four digits as integers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCost:
    """Affine step-time coefficients of one cluster, in femtoseconds.

    A prefill step of one rank lasts `prefill_base + sum over its chunks of work(q, c)` with
    `work = prefill_token * q + prefill_pair * (q * c + q * (q + 1) / 2) + prefill_context * c`.
    A decode step of one rank with `rows` running requests holding `kv` tokens lasts
    `max over f of decode_forms[f] @ (1, rows, kv)`; a form is one roofline branch (compute, memory).
    A step of an engine lasts as long as its slowest rank, plus the expert exchange
    `exchange_base + exchange_row * (tokens or rows of all ranks)`.
    Leaves are Python ints or int64 arrays; floats are allowed where the simulator runs in float64.
    """

    prefill_base: Any
    prefill_token: Any
    prefill_pair: Any
    prefill_context: Any
    prefill_exchange_base: Any
    prefill_exchange_token: Any
    decode_forms: Any  # [F, 3] (per step, per running request, per KV token)
    decode_exchange_base: Any
    decode_exchange_row: Any

    def prefill_work(self, new_tokens: Any, cached_tokens: Any) -> Any:
        """Femtoseconds of `new_tokens` queries over `cached_tokens` of context, without the step's base.

        `q * c + q * (q + 1) / 2` counts the causal pairs, so work is additive over chunks except
        for `prefill_context`, which every chunk pays again for reading what it attends to.
        """
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2
        return (
            self.prefill_token * new_tokens
            + self.prefill_pair * pairs
            + self.prefill_context * cached_tokens
        )
