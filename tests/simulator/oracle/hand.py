"""Small workloads written by hand, for tests whose answers were worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator.workload import Workload

TICK = 10**6


def cost(**changes: Any) -> StepCost:
    """One tick per new token and ten per decode step; nothing else costs."""
    fields: dict[str, Any] = {
        "prefill_base": 0,
        "prefill_token": TICK,
        "prefill_pair": 0,
        "prefill_context": 0,
        "prefill_exchange_base": 0,
        "prefill_exchange_token": 0,
        "decode_forms": [[10 * TICK, 0, 0]],
        "decode_exchange_base": 0,
        "decode_exchange_row": 0,
    }
    return StepCost(**(fields | changes))


def workload(
    arrival: Sequence[int],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    nodes: Sequence[tuple[int, int, int]] = (),
    match: Sequence[int] | None = None,
    publish: Sequence[int] | None = None,
    output: Sequence[int] | None = None,
) -> Workload:
    """Requests, and below the root the (parent, start, end) of segments."""
    nowhere = [0] * len(arrival)
    table = [(0, 0, 0), *nodes]

    def column(values: Sequence[int] | None) -> Any:
        return np.asarray(nowhere if values is None else values, np.int32)

    return Workload(
        arrival=np.asarray(arrival, np.int64),
        input_tokens=column(input_tokens),
        output_tokens=column(output_tokens),
        image_tokens=column(None),
        match_node=column(match),
        publish_node=column(publish),
        output_node=column(publish if output is None else output),
        node_parent=column([n[0] for n in table]),
        node_start=column([n[1] for n in table]),
        node_end=column([n[2] for n in table]),
    )
