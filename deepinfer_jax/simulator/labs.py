"""The chapter's queueing lab as a cluster of unit-cost servers: the simulator itself answers it.

Lab 23 (the chapter, opening of 11 and section 11.2): four requests of 1,024 tokens arrive together
and 768 tokens of each may be reused. Matching takes one unit, 128 new tokens take one unit of a
prefill worker, a hand-off one or three, and a decode worker is busy for four units per request.
Workers serve one request at a time. All of these numbers are assigned, none is measured.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_TICK, StepCost
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.workload import Workload

UNIT = 10**9
"""Ticks of one assigned time unit (a second, since it must be something)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueLab:
    """The lab's assigned numbers; times in units, lengths in tokens."""

    requests: int = 4
    input_tokens: int = 1024
    reused_tokens: int = 768  # 0: nothing is shared, every prompt is computed whole
    prefill_workers: int = 2
    decode_workers: int = 2
    match: int = 1
    block_tokens: int = 128
    tokens_per_unit: int = 128
    handoff: int = 1
    decode: int = 4
    shared: bool = True  # every prefill worker reads the prefix; False: only worker 0 holds it
    local_policy: str = "local_affinity"  # how a prefill worker is chosen where caches are local

    def cluster(self) -> ClusterConfig:
        """The service: one rank per worker, one request at a time, no batching, free fetches."""
        own = {"cache_scope": "local", "prefill_policy": self.local_policy, "warm_engine": 0}
        common = {"cache_scope": "shared", "prefill_policy": "pull", "tier_quota": (1,)}
        return ClusterConfig(
            modes=(Mode.PROMPT,) * self.prefill_workers + (Mode.COMPLETION,) * self.decode_workers,
            slots=1,
            cost=self.cost(),
            block_tokens=self.block_tokens,
            match_ticks=self.match * UNIT,
            warm_requests=(0,),
            batch_requests=1,
            chunk_multiple=FOREVER,
            handoff_ticks=self.handoff * UNIT,
            decode_policy="round_robin",
            **(common if self.shared else own),
        )

    def cost(self) -> StepCost:
        """New tokens at `tokens_per_unit`, one unit per decode step, nothing else."""
        unit = UNIT * FEMTOSECONDS_PER_TICK
        if unit % self.tokens_per_unit:
            raise ValueError(
                f"tokens_per_unit={self.tokens_per_unit} does not divide a unit of {unit} fs: "
                "take a product of twos and fives"
            )
        return StepCost(
            prefill_base=0,
            prefill_token=unit // self.tokens_per_unit,
            prefill_pair=0,
            prefill_context=0,
            prefill_exchange_base=0,
            prefill_exchange_token=0,
            decode_forms=[[unit, 0, 0]],
            decode_exchange_base=0,
            decode_exchange_row=0,
        )

    def workload(self) -> Workload:
        """All requests at time zero; the first token comes with the prefill, the others decode.

        The trie has one node below the root, the shared prefix. It is always published; requests
        that reuse nothing do not match it.
        """
        blocks = max(self.reused_tokens // self.block_tokens, 1)
        everyone = np.ones(self.requests, np.int32)
        node = everyone if self.reused_tokens else 0 * everyone
        return Workload(
            arrival=np.zeros(self.requests, np.int64),
            input_tokens=everyone * self.input_tokens,
            output_tokens=everyone * (self.decode + 1),
            image_tokens=0 * everyone,
            match_node=node,
            publish_node=everyone,
            output_node=everyone,
            node_parent=np.zeros(2, np.int32),
            node_start=np.zeros(2, np.int32),
            node_end=np.asarray([0, blocks], np.int32),
        )


LAB_23 = {
    "local affinity": QueueLab(shared=False),
    "shared cache": QueueLab(),
    "shared, no hits": QueueLab(reused_tokens=0),
    "shared, slower handoff": QueueLab(handoff=3),
    "affinity, slower handoff": QueueLab(shared=False, handoff=3),
}
"""The chapter's five cases, in its order."""
