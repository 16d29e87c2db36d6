"""Decode steps: one row per running request, on upper bounds while a step is in flight.

Every request that decodes takes part in every decode step. Storage is served to the shortest output
first; where blocks run out, the longest output gives way. A request gives way only while nothing is
in flight (`must_drain`): its tokens are all known by then, and nobody reads its blocks. Source: the
released DeepInfer 0.1.0, which discards what is in flight, and asks a free block of requests that
need none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from deepinfer_jax.engine.plan import PlanRow, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.roster import Roster


def bound(roster: Roster, request: Request) -> int:
    """Positions that the request's next decode step may touch: all drafts, none rejected so far."""
    return request.proc + request.inflight + roster.config.step_rows


def must_drain(roster: Roster) -> bool:
    """Whether blocks are so short that a decode step can be planned only with nothing in flight."""
    if not roster.flying:
        return False
    wanted = [roster.storage.missing(r, bound(roster, r)) for r in _next_running(roster)]
    return not roster.storage.room(sum(n for n in wanted if n > 0))


def _next_running(roster: Roster) -> list[Request]:
    ready = [r for r in roster.prefilled if r.has_storage and r.schedulable]
    return roster.running + ready[: roster.config.max_num_seqs - len(roster.running)]


Lengths = Callable[[Sequence[Sequence[float]], Sequence[bool]], tuple[int, int]]
"""(rates of each request, whether proposals exist or are being made) -> (drafts to verify in all,
query rows of a request at most); see `draft_lengths`."""


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """What a decode step holds."""

    rows: list[PlanRow]
    preempted: list[Request]  # for it
    drafts: int | None = None  # as in `StepPlan`


def next_step(roster: Roster, lookback: int, lengths: Lengths | None = None) -> DecodeStep:
    """The next decode step, its rows in the order of `running`, possibly none.

    Requests keep their places from step to step, so that a row moves only when one before it left.

    Args:
      lookback: ids before a row that n-grams reach back to.
      lengths: chooses how many drafts are verified; None: all.
    """
    roster.promote()
    preempted = _serve(roster)
    previous = roster.flying[-1] if roster.flying else None
    drafts, q = None, roster.config.step_rows
    if lengths is not None and roster.running:
        pending = [r.has_proposals or r.outstanding > 0 or _draft_first(r) for r in roster.running]
        drafts, q = lengths([_older_rates(r) for r in roster.running], pending)
    rows = [_row(roster, r, previous, lookback, q) for r in roster.running]
    return DecodeStep(rows, preempted, drafts)


def _older_rates(request: Request) -> tuple[float, ...]:
    """Of the proposals before those that this step verifies, which do not depend on its tokens."""
    return request.rates if request.outstanding else request.previous_rates


def _serve(roster: Roster) -> list[Request]:
    """Blocks for every running request, or fewer running requests."""
    preempted: list[Request] = []
    for request in sorted(roster.running, key=_seniority):
        while request in roster.running and not _fit(roster, request):
            victim = max(roster.running, key=_seniority)
            roster.preempt(victim)
            preempted.append(victim)
    return preempted


def _seniority(request: Request) -> tuple[int, int]:
    """Output length; of equals, the one that came later gives way first."""
    return request.output_length, request.arrival


def _fit(roster: Roster, request: Request) -> bool:
    if roster.storage.fit(request, bound(roster, request)):
        return True
    assert not roster.flying, "blocks are short: commit the step in flight before planning"
    roster.collect()
    roster.free_leaving()
    return roster.storage.fit(request, bound(roster, request))


def _draft_first(request: Request) -> bool:
    """Handed over, and free of a grammar, whose masks need drafts that the host knows."""
    return request.planned == 0 and request.grammar is None


def _row(
    roster: Roster, request: Request, previous: StepPlan | None, lookback: int, rows: int
) -> PlanRow:
    remap = previous.index.get(request.request_id) if previous else None
    fresh = remap is None
    draft_first = _draft_first(request)
    read = request.has_proposals or not fresh or draft_first
    k = request.proc + request.inflight + rows
    _check_bounds(roster, request, k, rows)
    tokens = (request.tokens[-1], *request.drafts)[:rows]
    return PlanRow(
        request_id=request.request_id,
        q=rows,
        k=k,
        tokens=tokens if fresh else (),
        lookback=tuple(request.tokens[:-1][-lookback:]) if fresh and lookback else (),
        blocks=request.blocks,
        slot=request.slot,
        remap=remap,
        draft_slot=request.draft_slot,
        read_slot=request.draft_slot if read else 0,
        draft_first=draft_first and request.draft_slot > 0,
    )


def _check_bounds(roster: Roster, request: Request, k: int, rows: int) -> None:
    """I2: the step reaches the newest token and no further than its drafts. I5, I6."""
    config, name = roster.config, f"request {request.request_id}"
    known, nextn = request.length, config.cache.nextn
    assert known <= request.proc + rows <= known + nextn, f"{name}: {request.proc} of {known}"
    most = k - rows + config.step_rows
    assert most + nextn <= config.runtime_max_len, f"{name}: bound {most}"
    assert roster.storage.missing(request, most) == 0, f"{name}: {len(request.blocks)} blocks"
