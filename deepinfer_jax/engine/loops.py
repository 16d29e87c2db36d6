"""Two loops around one scheduler and one device: in turn, or with the host a step ahead.

`normal_call` plans a step, runs it and commits it. `overlap_call` plans step N from bounds while
step N - 1 still runs, commits N - 1 while the backbone of N runs, and leaves N in flight; the
device corrects N's lengths and ids by what N - 1 accepted. Sampling of N is queued behind the
commit of N - 1, so grammar masks and forced tokens are current. A prompt step is committed in its
own call in both. Both give the same tokens.
Source: the chapter, sections 11.7 and 11.8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.device import Device, Pending
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.draft_lengths import Chooser
from deepinfer_jax.engine.plan import RequestOutput, StepOutcome, StepPlan
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.statistics import StepRecord, verified_counts
from deepinfer_jax.engine.validation import check_request
from deepinfer_jax.rules import require

News = list[RequestOutput]


class Sampled(Protocol):
    """A sampled step that was not waited for."""

    @property
    def plan(self) -> StepPlan:
        """What it holds."""
        ...

    @property
    def queued(self) -> float:
        """When its forward pass was queued, `time.perf_counter`."""
        ...

    def wait(self, requests: Sequence[Request]) -> tuple[StepOutcome, float]:
        """See `Pending.wait`."""
        ...


class Rank:
    """A scheduler, and what makes its steps history: the part of an engine that a group has too."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: ModelConfig,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """`record` gets each committed step that had rows.

        Raises:
          ValueError: the scheduler gives n-grams another lookback than the model's.
        """
        needed = reach(model)
        require(
            scheduler.lookback == needed,
            f"the scheduler gives {scheduler.lookback} ids before a row and the model's n-grams "
            f"reach back to {needed}; make it with lookback {needed}",
        )
        self.scheduler, self.record = scheduler, record
        self._ended = 0.0  # when the newest committed step was over

    def check(self, request: Request) -> None:
        """See `validation.check_request`."""
        check_request(request, self.scheduler.config, self.scheduler.vocab_size)

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        self.scheduler.add(request)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> RequestOutput | None:
        """See `Scheduler.abort`."""
        return self.scheduler.abort(request_id, status)

    @property
    def unfinished(self) -> bool:
        """Whether a further call would do something."""
        return self.scheduler.unfinished

    @property
    def decoding(self) -> bool:
        """Whether a request decodes."""
        return bool(self.scheduler.roster.running)

    def requests(self, plan: StepPlan) -> list[Request]:
        """The requests of a plan's rows."""
        return [self.scheduler.roster.requests[row.request_id] for row in plan.rows]

    def commit(self, pending: Sampled) -> News:
        """Wait for a step and make it history; grammars follow the tokens that count."""
        plan, requests = pending.plan, self.requests(pending.plan)
        outcome, error = pending.wait(requests)
        news = self.scheduler.commit(plan, outcome)
        by_id = {r.request_id: r for r in requests}
        for output in news:
            request = by_id[output.request_id]
            if request.grammar is not None and not request.status.finished:
                request.grammar.advance(output.tokens)
        self._observe(pending)
        if self.record is not None and plan.rows:
            self.record(self._record(pending, outcome, error, news))
        return news + self.failed(requests)

    def failed(self, requests: list[Request]) -> News:
        """End those whose grammar failed."""
        wrong = [r for r in requests if r.grammar is not None and r.grammar.error]
        ended = [self.scheduler.abort(r.request_id, Status.GRAMMAR_FAILED) for r in wrong]
        return [output for output in ended if output is not None]

    def _observe(self, pending: Sampled) -> None:
        """A step took the time since it was queued, or since the device was done with the last."""
        began, self._ended = max(pending.queued, self._ended), time.perf_counter()
        plan, chooser = pending.plan, self.scheduler.lengths
        if isinstance(chooser, Chooser) and plan.rows and not plan.is_prompt:
            chooser.observe(len(plan.rows), plan.rows[0].q, 1e3 * (self._ended - began))

    def _record(
        self, pending: Sampled, outcome: StepOutcome, error: float, news: News
    ) -> StepRecord:
        plan, roster, nextn = pending.plan, self.scheduler.roster, self.scheduler.config.cache.nextn
        rows = [] if plan.is_prompt else list(zip(plan.rows, outcome.rows, strict=True))
        verified, accepted = verified_counts(
            [o.q or r.q for r, o in rows], [o.accepted for _, o in rows], nextn
        )
        blocks = roster.storage.blocks
        return StepRecord(
            is_prompt=plan.is_prompt,
            start=pending.queued,
            end=self._ended,
            requests=len(plan.rows),
            rows=plan.total_q,
            useful=sum(len(output.tokens) for output in news),
            verified=verified,
            accepted=accepted,
            confidence_error=error,
            running=len(roster.running),
            pending=len(roster.waiting) + len(roster.prefilled),
            blocks_used=blocks.used_count,
            blocks=blocks.size - 1,
        )


class Engine(Rank):
    """A scheduler, its device, and the sampled step in flight. A `pair.Pair` is called alike."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """See `Rank`."""
        super().__init__(scheduler, device.model, record)
        self.device = device
        self.flying: Pending | None = None

    def call(self) -> News:
        """One call of the configured loop."""
        return overlap_call(self) if self.scheduler.config.overlap else normal_call(self)

    def land(self) -> News:
        """Commit the step in flight, if there is one."""
        return land(self)

    def warm_up(self, masks: bool = False, images: bool = False, pictures: bool = False) -> None:
        """See `Device.warm_up`."""
        self.device.warm_up(masks, images, pictures)

    def forward(self, plan: StepPlan) -> None:
        """Queue the backbone; the plan is in flight from now on."""
        self.device.forward(plan, self.requests(plan))
        self.scheduler.launch(plan)

    def sample(self, plan: StepPlan) -> tuple[Pending, News]:
        """Queue sampling; requests whose grammar failed while masks were made end here."""
        pending = self.device.sample(plan, self.requests(plan))
        return pending, self.failed(self.requests(plan))


def normal_call(engine: Engine) -> News:
    """Plan, run, commit, release."""
    s = engine.scheduler
    plan = s.plan()
    engine.forward(plan)
    pending, failed = engine.sample(plan)
    news = [*plan.news, *failed]
    news += engine.commit(pending)
    s.release(plan)
    return news


def overlap_call(engine: Engine) -> News:
    """Plan and queue a step, commit the one before, and leave a decode step in flight."""
    s = engine.scheduler
    news = land(engine) if s.must_drain else []
    plan = s.plan()
    engine.forward(plan)
    news += plan.news
    news += land(engine)
    pending, failed = engine.sample(plan)
    news += failed
    engine.flying = pending
    if plan.is_prompt:
        news += land(engine)
    s.release(plan)
    return news


def land(engine: Engine) -> News:
    """Commit the step in flight, if there is one."""
    pending, engine.flying = engine.flying, None
    return engine.commit(pending) if pending else []


def normal_loop(engine: Engine) -> Iterator[News]:
    """News of call after call, until nothing is left to do."""
    while engine.scheduler.unfinished:
        yield normal_call(engine)


def overlap_loop(engine: Engine) -> Iterator[News]:
    """As `normal_loop`; what flies at the end holds no request and is committed for good order."""
    while engine.scheduler.unfinished:
        yield overlap_call(engine)
    yield land(engine)
