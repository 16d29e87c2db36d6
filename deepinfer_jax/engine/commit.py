"""What a step did becomes history: tokens up to a stop, lengths, proposals, full blocks.

A stop may lie inside the accepted drafts: the tokens behind it do not count, though the device went
on from them; the step already in flight for that request is then obsolete and says nothing here.
Stops are looked for after each token, in this order: a stop id, `stop_when`, max_model_len,
max_tokens. Source: the released DeepInfer 0.1.0.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.engine.plan import PlanRow, RequestOutput, RowOutcome, StepOutcome, StepPlan
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.roster import Roster


def commit_step(roster: Roster, plan: StepPlan, outcome: StepOutcome) -> list[RequestOutput]:
    """The oldest step in flight is over; news of its requests, in the plan's order.

    Requests that have finished meanwhile, and chunks of prompts that are not the last, have none.
    """
    assert roster.flying and roster.flying[0] is plan, f"step {plan.number} is not the oldest"
    assert len(outcome.rows) == len(plan.rows), f"step {plan.number}: {len(outcome.rows)} outcomes"
    roster.flying.pop(0)
    news = []
    for row, result in zip(plan.rows, outcome.rows, strict=True):
        request = roster.requests[row.request_id]
        request.committed += 1
        request.inflight -= row.q if plan.is_prompt else roster.config.step_rows
        if not request.status.finished:
            output = _prompt if plan.is_prompt else _decode
            news += output(roster, request, row, result)
    return news


def _prompt(
    roster: Roster, request: Request, row: PlanRow, result: RowOutcome
) -> list[RequestOutput]:
    request.proc = row.k
    roster.publish(request)
    if not row.last_chunk:
        return []
    assert len(result.tokens) == 1, f"a prompt samples one token, not {len(result.tokens)}"
    roster.start(request)
    return [_advance(roster, request, result, 0)]


def _decode(
    roster: Roster, request: Request, row: PlanRow, result: RowOutcome
) -> list[RequestOutput]:
    rows = result.q or row.q
    assert 1 <= len(result.tokens) <= rows, f"{len(result.tokens)} tokens from {rows} rows"
    before = request.length
    output = _advance(roster, request, result, rows - 1)
    request.proc += request.length - before
    roster.publish(request)
    return [output]


def _advance(roster: Roster, request: Request, result: RowOutcome, verified: int) -> RequestOutput:
    """Tokens and proposals of a request, and its end if it has come."""
    before = request.length
    status = append(request, result.tokens, roster.config)
    tokens = tuple(request.tokens[before:])
    if status.finished:
        roster.finish(request, status)
    else:
        propose(request, result)
    return RequestOutput(
        request.request_id,
        tokens,
        status.value if status.finished else None,
        verified,
        result.accepted,
        result.details,
    )


def append(request: Request, tokens: Sequence[int], config: EngineConfig) -> Status:
    """Add tokens up to the first that ends the request; its status from then on."""
    for token in tokens:
        request.tokens.append(token)
        if token in request.stop_ids or (request.stop_when and request.stop_when(request)):
            return Status.STOPPED
        if request.length > config.max_model_len or request.output_length == request.max_tokens:
            return Status.LENGTH_CAPPED
    return request.status


def propose(request: Request, result: RowOutcome) -> None:
    """Note the step's proposals; a step already in flight for the request reads them itself."""
    request.drafts = result.drafts
    request.has_proposals = bool(result.drafts) and request.outstanding == 0
    request.previous_rates = request.rates
    request.rates = tuple(itertools.accumulate(result.confidences, operator.mul))
