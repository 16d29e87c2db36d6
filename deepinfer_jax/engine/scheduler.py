"""The scheduler: what an engine's loop calls, between the device's steps, in microseconds.

One call of either loop, `wait` being the device's:

    normal    plan(N)  launch(N)  commit(N, wait(N))          release(N)
    overlap   plan(N)  launch(N)  commit(N-1, wait(N-1))      release(N)

A prompt step is committed in its own call in both, before or after `release(N)`. Where `must_drain`
is true, the overlap loop commits what is in flight before it plans. `release(N)` frees what had
finished when N was planned: step N does not hold it, and the step before was just waited for. A
finished request is thus freed by the call after the one that told of its end. A call goes on as
long as `unfinished`; what is then in flight holds no request and is committed for good order.
Source: the chapter, section 11.8.
"""

from __future__ import annotations

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.engine import decode
from deepinfer_jax.engine.commit import commit_step
from deepinfer_jax.engine.plan import PlanRow, RequestOutput, StepOutcome, StepPlan
from deepinfer_jax.engine.prefill import prompt_rows
from deepinfer_jax.engine.prefix import PrefixSource
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.roster import Roster
from deepinfer_jax.engine.validation import check_prefilled, check_request, check_role
from deepinfer_jax.engine.vote import prefill_confirmed, prefill_vote
from deepinfer_jax.rules import require


class Scheduler:
    """The requests of one engine, or of one rank of a data-parallel group."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        cost: StepCost | None = None,
        source: PrefixSource | None = None,
        lookback: int = 0,
        lengths: decode.Lengths | None = None,
    ) -> None:
        """An idle engine.

        Args:
          vocab_size: ids run from 0 to it; those of an image's tokens may lie behind it.
          cost: step times, for a `step_quota`.
          source: a cache of prefixes.
          lookback: ids before a row that the model's n-grams reach back to.
          lengths: how many drafts a step verifies, for verification "confidence".

        Raises:
          ValueError: a `step_quota` without `cost`, or `lengths` missing or not used.
        """
        require(
            (lengths is not None) == (config.verification == "confidence"),
            f"verification is {config.verification!r}; give lengths with 'confidence' only, see "
            "`draft_lengths.Chooser`",
        )
        require(
            cost is not None or not config.step_quota,
            f"step_quota is {config.step_quota} femtoseconds; give the step times it is measured in",
        )
        self.config, self.vocab_size = config, vocab_size
        self.cost, self.lookback, self.lengths = cost, lookback, lengths
        self.roster = Roster(config, source)
        self.decode_step = 0  # decode steps since the last prompt step
        self._number = 0
        self._planned: StepPlan | None = None  # planned, not launched
        self._unreleased: StepPlan | None = None  # launched, its `finished` still own storage

    # Requests

    def add(self, request: Request) -> None:
        """Take a request: a prompt, or, with `output`, one that another engine prefilled.

        Raises:
          ValueError: the first rule that it breaks; nothing has changed then.
        """
        require(
            request.request_id not in self.roster.requests,
            f"request {request.request_id} is here already; ids must differ, so number them anew",
        )
        check_request(request, self.config, self.vocab_size)
        check_role(request, self.config)
        if request.output_length:
            check_prefilled(request)
            request.status = Status.PREFILLED
        self.roster.enter(request)

    def take_in(self) -> tuple[Request, ...]:
        """Storage for prefilled requests, first come first served; those that have it since now.

        The caller fills their blocks and slots before it plans again, or sets `schedulable` false
        until it has. A crowded pool takes nobody in while requests decode.
        """
        roster, taken = self.roster, []
        for request in roster.prefilled:
            if request.has_storage:
                continue
            if (roster.running and roster.storage.crowded()) or not roster.storage.admit(request):
                break
            taken.append(request)
        return tuple(taken)

    def handed_over(self, request_id: int) -> None:
        """A prompt engine's request has been read out: its storage is free again.

        Raises:
          ValueError: no such request waits for it.
        """
        request = self.roster.requests.get(request_id)
        require(
            request is not None and request.status == Status.HANDOVER,
            f"request {request_id} is not being handed over; it ended before, or never was here",
        )
        assert request is not None
        self.roster.handover.remove(request)
        self.roster.storage.release(request)
        self.roster.forget(request)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> RequestOutput | None:
        """End a request wherever it stands, at any time; None if it has ended before.

        Steps in flight still hold it; their outcome for it is skipped, and its storage is freed
        once they are committed. `status` may name a failed grammar or image instead.
        """
        request = self.roster.requests.get(request_id)
        if request is None or request.status.finished:
            return None
        self.roster.finish(request, status)
        return RequestOutput(request_id, finish_reason=status.value)

    @property
    def unfinished(self) -> bool:
        """Whether a further call would do something."""
        r = self.roster
        return bool(r.waiting or r.prefilled or r.running or r.ending or r.leaving)

    # Steps

    @property
    def must_drain(self) -> bool:
        """Whether the step in flight must be committed before the next can be planned."""
        return self.config.role != Role.PROMPT and decode.must_drain(self.roster)

    def plan(self) -> StepPlan:
        """The next step of an engine that stands alone."""
        return plan_group((self,))[0]

    def launch(self, plan: StepPlan) -> None:
        """The device has the plan: its rows are in flight from now on."""
        assert plan is self._planned, f"step {plan.number} was not planned just now"
        for row in plan.rows:
            request = self.roster.requests[row.request_id]
            request.planned += 1
            request.inflight += row.q if plan.is_prompt else self.config.step_rows
            request.has_proposals = False  # read once
        self.roster.flying.append(plan)
        self._planned, self._unreleased = None, plan

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[RequestOutput]:
        """The oldest step in flight is over, and has been waited for; its news."""
        return commit_step(self.roster, plan, outcome)

    def release(self, plan: StepPlan) -> None:
        """Free the storage of `plan.finished`; all steps before the plan are committed."""
        assert plan is self._unreleased, f"step {plan.number} was not launched last"
        flying = [p.number for p in self.roster.flying if p.number < plan.number]
        assert not flying, f"steps {flying} may still read what step {plan.number} frees"
        self._unreleased = None
        self.roster.free_leaving()

    def check_integrity(self) -> None:
        """I1 - I7 as far as they hold between calls; AssertionError says what does not."""
        self.roster.check_integrity()
        assert len(self.roster.flying) <= 2, "more than one step was launched ahead"

    # One rank's part in planning a group's step

    def wants_prompt(self) -> bool:
        """Whether a prompt may start or go on here: it is ready, and there is room or no work."""
        roster = self.roster
        if self.config.role == Role.COMPLETION or not roster.waiting:
            return False
        head = roster.waiting[0]
        idle = not roster.running
        return head.schedulable and (head.has_storage or idle or not roster.storage.crowded())

    def prompt_rows(self) -> list[PlanRow]:
        """Rows of a prompt step, possibly none."""
        return prompt_rows(self.roster, self.cost, self.lookback)

    def next_decode(self) -> decode.DecodeStep:
        """A decode step, possibly without rows."""
        return decode.next_step(self.roster, self.lookback, self.lengths)

    def seal(self, is_prompt: bool, step: decode.DecodeStep) -> StepPlan:
        """The plan of this step, with the chapter's checks (listing 11.2) and I7."""
        rows, gone = step.rows, step.preempted
        assert self._planned is None, "the last plan was not launched"
        assert self._unreleased is None, "the last plan was not released"
        assert not any(p.is_prompt for p in self.roster.flying), "a prompt step is in flight"
        assert not (is_prompt and self.config.role == Role.COMPLETION), "no prompts here"
        assert is_prompt or not rows or self.config.role != Role.PROMPT, "no decoding here"
        assert all(row.q > 0 for row in rows), "a row without queries"
        plan = StepPlan(
            number=self._number,
            is_prompt=is_prompt,
            rows=tuple(rows),
            drafts=step.drafts,
            finished=self.roster.collect(),
            preempted=tuple(r.request_id for r in gone),
            news=tuple(
                RequestOutput(r.request_id, finish_reason=r.status.value)
                for r in gone
                if r.status.finished
            ),
        )
        assert plan.total_q <= self.config.batched_tokens, f"{plan.total_q} rows"  # I7
        assert len(rows) <= self.config.max_num_seqs, f"{len(rows)} requests"
        self._planned, self._number = plan, self._number + 1
        self.decode_step = 0 if is_prompt else self.decode_step + 1
        return plan


def plan_group(ranks: tuple[Scheduler, ...]) -> list[StepPlan]:
    """The next step of each rank of a data-parallel group, all of one kind.

    Ranks that take no part run a placeholder. A group over several processes replaces the lists by
    collectives of the same votes.
    """
    config = ranks[0].config
    prompt = config.role == Role.PROMPT or prefill_vote(
        ranks[0].decode_step,
        [rank.wants_prompt() for rank in ranks],
        [bool(rank.roster.running) for rank in ranks],
        config.prefill_interval,
        config.prefill_any_interval,
    )
    if prompt:
        rows = [rank.prompt_rows() for rank in ranks]
        if config.role == Role.PROMPT or prefill_confirmed([len(r) for r in rows]):
            steps = [decode.DecodeStep(r, []) for r in rows]
            return [rank.seal(True, step) for rank, step in zip(ranks, steps, strict=True)]
    return [rank.seal(False, rank.next_decode()) for rank in ranks]
