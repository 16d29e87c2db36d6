"""Engine ranks that step together, to a caller as one engine.

Each rank has a scheduler of its own; all plan steps of one kind (`plan_group`), run
as one program, and commit by themselves. The loops are those of `loops`, rank by rank in each line.
Source: the chapter, section 11.1, for the votes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_jax.engine.loops import News, Rank
from deepinfer_jax.engine.mesh_device import MeshDevice, RankPending
from deepinfer_jax.engine.plan import RequestOutput
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler, plan_group
from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.rules import require


class Group:
    """The ranks of a mesh."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        device: MeshDevice,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """Idle ranks; `record` gets each rank's committed steps.

        Raises:
          ValueError: not one scheduler for each rank.
        """
        require(
            len(schedulers) == device.ranks,
            f"{len(schedulers)} schedulers for {device.ranks} ranks; give one to each",
        )
        self.device = device
        self.engines = tuple(Rank(scheduler, device.model, record) for scheduler in schedulers)
        self.flying: list[RankPending] = []

    # What a caller needs, as of an `Engine`

    def check(self, request: Request) -> None:
        """See `validation.check_request`."""
        self.engines[0].check(request)

    def add(self, request: Request, rank: int | None = None) -> None:
        """Give a request to a rank, by default to the one with the fewest tokens to serve."""
        if rank is None:
            rank = min(range(len(self.engines)), key=self._load)
        self.engines[rank].add(request)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> RequestOutput | None:
        """See `Scheduler.abort`; on whatever rank the request is."""
        ended = [engine.abort(request_id, status) for engine in self.engines]
        return next((output for output in ended if output is not None), None)

    @property
    def unfinished(self) -> bool:
        """Whether a further call would do something on some rank."""
        return any(engine.unfinished for engine in self.engines)

    @property
    def decoding(self) -> bool:
        """Whether a request decodes."""
        return any(engine.decoding for engine in self.engines)

    def call(self) -> News:
        """One call of the configured loop on all ranks."""
        schedulers = [engine.scheduler for engine in self.engines]
        overlap = schedulers[0].config.overlap
        news = self.land() if any(s.must_drain for s in schedulers) else []
        plans = plan_group(tuple(schedulers))
        requests = [e.requests(plan) for e, plan in zip(self.engines, plans, strict=True)]
        self.device.forward(plans, requests)
        for scheduler, plan in zip(schedulers, plans, strict=True):
            scheduler.launch(plan)
            news += plan.news
        news += self.land()
        self.flying = self.device.sample(plans, requests)
        for engine, asking in zip(self.engines, requests, strict=True):
            news += engine.failed(asking)
        if plans[0].is_prompt or not overlap:
            news += self.land()
        for scheduler, plan in zip(schedulers, plans, strict=True):
            scheduler.release(plan)
        return news

    def land(self) -> News:
        """Commit the step in flight, if there is one."""
        pending, self.flying = self.flying, []
        return [
            news
            for engine, part in zip(self.engines, pending, strict=bool(pending))
            for news in engine.commit(part)
        ]

    def warm_up(self, masks: bool = False, images: bool = False, pictures: bool = False) -> None:
        """See `MeshDevice.warm_up`."""
        require(not images, "prefix caches are kept by engines of one device; leave them out here")
        self.device.warm_up(masks, pictures)

    def _load(self, rank: int) -> int:
        roster = self.engines[rank].scheduler.roster
        return sum(r.length + r.max_tokens for r in roster.requests.values())


def make_group(
    device: MeshDevice,
    lookback: int,
    record: Callable[[StepRecord], None] | None = None,
    **settings: Any,
) -> Group:
    """Idle ranks over a device; `settings` are keywords of `Scheduler` besides."""
    vocabulary = device.model.vocab_size
    schedulers = [
        Scheduler(device.config, vocabulary, lookback=lookback, **settings)
        for _ in range(device.ranks)
    ]
    return Group(schedulers, device, record)
