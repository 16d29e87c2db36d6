"""Who is where: the queues of one engine, and every move of a request between them.

A request is in one place at a time. `waiting` is in order of arrival, but who owns storage goes
first: else a prompt between two chunks could hold the blocks that the one before it waits for.
`ending` holds what has finished and still owns storage, which no step may be reading when it is
given back: a plan collects it into `leaving`, and the plan's `release` frees it.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.prefix import PrefixSource
from deepinfer_jax.engine.request import Hit, Request, Status
from deepinfer_jax.engine.storage import Storage


class Roster:
    """Queues, storage and steps in flight. Methods keep them consistent with one another."""

    def __init__(self, config: EngineConfig, source: PrefixSource | None = None) -> None:
        """An idle engine."""
        self.config = config
        self.source = source
        self.storage = Storage(config, source.reclaim if source else None)
        self.requests: dict[int, Request] = {}  # all that are not forgotten
        self.waiting: list[Request] = []
        self.prefilled: list[Request] = []  # with or without storage, for a seat
        self.running: list[Request] = []  # in order of their first decode step
        self.handover: list[Request] = []
        self.ending: list[Request] = []
        self.leaving: list[Request] = []  # collected, not yet freed
        self.flying: list[StepPlan] = []  # launched and not committed, oldest first
        self.arrivals = 0

    def enter(self, request: Request) -> None:
        """A new request joins its queue."""
        self.arrivals += 1
        request.arrival = self.arrivals
        self.requests[request.request_id] = request
        prefilled = request.status == Status.PREFILLED
        (self.prefilled if prefilled else self.waiting).append(request)

    def admit(self, request: Request, hit: Hit | None) -> bool:
        """Storage for a prompt, whose computation starts behind its hit; or nothing at all."""
        if not self.storage.admit(request, hit):
            return False
        request.hit = hit
        request.proc = hit.compute_hit if hit else 0
        request.published = hit.block_hit // self.config.cache.block_tokens if hit else 0
        self.waiting.remove(request)
        self._queue(request)
        return True

    def start(self, request: Request) -> None:
        """Its prompt is done: it decodes from now on, or is handed over."""
        self.waiting.remove(request)
        if self.config.role == Role.PROMPT:
            self.storage.unseat(request)
            request.status = Status.HANDOVER
            self.handover.append(request)
        else:
            request.status = Status.RUNNING
            self.running.append(request)

    def promote(self) -> None:
        """Requests prefilled elsewhere take free seats, first come first served."""
        ready = [r for r in self.prefilled if r.has_storage and r.schedulable]
        for request in ready[: self.config.max_num_seqs - len(self.running)]:
            self.prefilled.remove(request)
            request.status = Status.RUNNING
            self.running.append(request)
            self.storage.seat(request)

    def finish(self, request: Request, status: Status) -> None:
        """No further token comes. Its seat is free at once, its storage once nobody reads it."""
        self._place(request).remove(request)
        request.status = status
        self.storage.unseat(request)
        if request.has_storage:
            self.ending.append(request)
        else:
            self.forget(request)

    def preempt(self, request: Request) -> None:
        """It loses its storage and is computed again, or ends if the engine does not do that.

        Nothing of it is in flight, so nobody reads its blocks and no token of it is lost.
        """
        assert request.outstanding == 0, f"request {request.request_id} is in flight"
        self.storage.release(request)
        request.preemptions += 1
        if self.config.stop_preempted:
            self.finish(request, Status.PREEMPTED)
            return
        self.running.remove(request)
        request.proc, request.published, request.hit = 0, 0, None
        request.forget_drafts()
        request.status = Status.WAITING
        self._queue(request)

    def collect(self) -> tuple[int, ...]:
        """What has finished leaves with the plan that is being made."""
        self.leaving += self.ending
        self.ending = []
        return tuple(r.request_id for r in self.leaving)

    def free_leaving(self) -> None:
        """Storage of the collected ones; the caller has waited for all steps that hold them."""
        for request in self.leaving:
            assert request.outstanding == 0, f"request {request.request_id} is in flight"
            self.storage.release(request)
            self.forget(request)
        self.leaving = []

    def forget(self, request: Request) -> None:
        """The engine no longer knows the request."""
        del self.requests[request.request_id]

    def publish(self, request: Request) -> None:
        """Tell the prefix source of blocks that have become full by committed rows."""
        full = request.proc // self.config.cache.block_tokens
        if self.source is not None and full > request.published:
            self.source.publish(request, full)
            request.published = full

    def _queue(self, request: Request) -> None:
        def rank(other: Request) -> tuple[bool, int]:
            return not other.has_storage, other.arrival

        at = sum(rank(other) < rank(request) for other in self.waiting)
        self.waiting.insert(at, request)

    def _place(self, request: Request) -> list[Request]:
        return {
            Status.WAITING: self.waiting,
            Status.PREFILLED: self.prefilled,
            Status.RUNNING: self.running,
            Status.HANDOVER: self.handover,
        }[request.status]

    def check_integrity(self) -> None:
        """Invariants I1, I3 and I4, one place for each request, and pools that match the tables."""
        known = list(self.requests.values())
        places = (self.waiting, self.prefilled, self.running, self.handover)
        for place in places:
            assert all(self._place(r) is place for r in place if not r.status.finished)
            assert not any(r.status.finished for r in place), f"{place} holds a finished request"
        gone = (*self.ending, *self.leaving)
        assert all(r.status.finished and r.has_storage for r in gone)
        placed = [r.request_id for place in (*places, gone) for r in place]
        assert sorted(placed) == sorted(self.requests), f"{placed} of {list(self.requests)}"
        ranks = [(not r.has_storage, r.arrival) for r in self.waiting]
        assert ranks == sorted(ranks), f"the queue is out of order: {ranks}"
        for request in known:
            request.check(self.config)
            held = sum(request.request_id in plan.index for plan in self.flying)
            assert held == request.outstanding, f"request {request.request_id} is in {held} steps"
        assert len(self.running) <= self.config.max_num_seqs
        self.storage.check_integrity(known, self._cached())

    def _cached(self) -> Iterable[int]:
        return self.source.held() if self.source else ()
