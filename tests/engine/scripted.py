"""Both loops around a scheduler, and a device that only follows orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer_jax.engine.correction import device_k
from deepinfer_jax.engine.plan import RequestOutput, RowOutcome, StepOutcome, StepPlan
from deepinfer_jax.engine.scheduler import Scheduler, plan_group

Script = Callable[[StepPlan, int], RowOutcome]  # the outcome of one row of a plan


class Loop:
    """One scheduler, its step in flight, the news, and the device's key lengths per step."""

    def __init__(self, scheduler: Scheduler, script: Script) -> None:
        self.scheduler, self.script = scheduler, script
        self.previous: tuple[StepPlan, StepOutcome] | None = None
        self.news: list[RequestOutput] = []
        self.device: dict[int, int] = {}  # request id to key length on the device, newest step

    def call(self, plan: StepPlan | None = None) -> StepPlan:
        """One call, of a plan made for a group if given; a decode step is left in flight."""
        s = self.scheduler
        if plan is None:
            self.drain()
            plan = s.plan()
        s.check_integrity()
        outcome = StepOutcome(tuple(self.script(plan, i) for i in range(len(plan.rows))))
        self.device = {r.request_id: self._device_k(plan, i) for i, r in enumerate(plan.rows)}
        s.launch(plan)
        s.check_integrity()
        self.news += plan.news
        self.commit()
        self.previous = plan, outcome
        if plan.is_prompt or not s.config.overlap:
            self.commit()
        s.check_integrity()
        s.release(plan)
        s.check_integrity()
        return plan

    def drain(self) -> None:
        if self.scheduler.must_drain:
            self.commit()

    def commit(self) -> None:
        if self.previous is not None:
            self.news += self.scheduler.commit(*self.previous)
            self.previous = None

    def _device_k(self, plan: StepPlan, i: int) -> int:
        row = plan.rows[i]
        if row.remap is None:
            return row.k
        assert self.previous is not None
        accepted = self.previous[1].rows[row.remap].accepted
        return device_k(row.start, row.q, self.scheduler.config.cache.nextn, accepted)

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left; what is then in flight is committed."""
        for _ in range(limit):
            if not self.scheduler.unfinished:
                break
            self.call()
        self.commit()
        assert not self.scheduler.unfinished


def call_group(loops: Sequence[Loop]) -> list[StepPlan]:
    """One call of each rank of a data-parallel group."""
    for loop in loops:
        loop.drain()
    plans = plan_group(tuple(loop.scheduler for loop in loops))
    return [loop.call(plan) for loop, plan in zip(loops, plans, strict=True)]
