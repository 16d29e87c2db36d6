"""What happened to each request of a run: the noun that metrics and reports read, and its books."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

NANOSECONDS_PER_SECOND = 10**9
MISSING = -1
COMPLETED = 0
STATUSES = (
    "completed",
    "rejected: too long",
    "rejected: queue full",
    "rejected: cannot meet its SLO",
    "lost: crash",
    "lost: unfinished at the end",
)
EVENTS = (
    "arrival",
    "matched",
    "pulled",
    "fetched",
    "prefill_start",
    "first_token",
    "handed_off",
    "decode_start",
    "finish",
)
STAGES = (
    "match",
    "queue",
    "fetch",
    "prefill wait",
    "prefill",
    "hand-off",
    "decode wait",
    "decode",
)  # STAGES[i] lasts from EVENTS[i] to EVENTS[i + 1]
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestTimeline:
    """What happened to each request. Arrays [Q]; times in ticks (int64 ns), `MISSING` if never.

    Times of a repeated event (a preempted or rerouted request) are those of its last occurrence,
    except `first_token`, which a client sees once. `timeline(...)` fills in what a caller lacks.
    """

    arrival: Array  # the request reached the entrypoint
    matched: Array  # the prefix match ended
    pulled: Array  # a prefill engine took it from the tier queue
    fetched: Array  # its cached state is on that engine
    prefill_start: Array  # the first step that computes its prompt began
    first_token: Array  # prefill ended; the first token exists
    handed_off: Array  # its state is on the decode engine
    decode_start: Array  # it joined a decode batch
    finish: Array  # the last token exists
    input_tokens: Array
    output_tokens: Array  # tokens really produced, the first one included
    block_hit_tokens: Array  # L1: tokens of the matched full blocks
    compute_hit_tokens: Array  # H: tokens whose prefill was skipped, H <= L1
    status: Array  # index into `statuses`
    prefill_engine: Array
    decode_engine: Array
    decode_rank: Array
    preemptions: Array  # how often it was preempted or rerouted
    statuses: tuple[str, ...] = dataclasses.field(
        default=STATUSES, metadata={"static": True}
    )  # statuses[0] is "completed"; the others begin with "rejected" or "lost"


def timeline(
    arrival: Array, finish: Array, *, statuses: tuple[str, ...] = STATUSES, **known: Array
) -> RequestTimeline:
    """A `RequestTimeline` from what a caller knows: int64 numpy arrays [Q], the rest filled in.

    Unknown times, engines and ranks become `MISSING`, unknown token counts and `preemptions` 0,
    an unknown `status` follows from `finish`: completed where it is set, else the last status.
    """
    absent = {"output_tokens", "input_tokens", "block_hit_tokens", "compute_hit_tokens"}
    arrival, finish = (np.asarray(a, np.int64) for a in (arrival, finish))
    fields = {"arrival": arrival, "finish": finish}
    for field in dataclasses.fields(RequestTimeline):
        if field.name in ("arrival", "finish", "statuses"):
            continue
        zero = field.name in absent or field.name == "preemptions"
        default = np.full(arrival.shape, 0 if zero else MISSING, np.int64)
        if field.name == "status":
            default = np.where(finish >= 0, COMPLETED, len(statuses) - 1)
        fields[field.name] = np.asarray(known.pop(field.name, default), np.int64)
    if known:
        raise ValueError(f"{sorted(known)} are not fields of RequestTimeline; see its docstring")
    return RequestTimeline(**fields, statuses=statuses)


def account(
    requests: int, completed: int, rejected: Mapping[str, int], lost: Mapping[str, int]
) -> dict[str, Any]:
    """The books of a run: requests in = completed + rejected + lost, each with its reason.

    Raises:
      ValueError: the numbers do not add up, or one is negative.
    """
    parts = [completed, *rejected.values(), *lost.values()]
    if min(parts) < 0 or sum(parts) != requests:
        raise ValueError(
            f"{requests} requests came in, but completed {completed} + rejected {dict(rejected)} + "
            f"lost {dict(lost)} = {sum(parts)}: every request must be counted once, so look for "
            "the stage that drops or repeats one"
        )
    return {
        "requests": requests,
        "completed": completed,
        "rejected": dict(rejected),
        "lost": dict(lost),
    }


def check(t: RequestTimeline) -> dict[str, Any]:
    """The books of a timeline, after checking that no request was served before its data existed.

    Order checked where the times are present: arrival <= matched <= pulled <= prefill_start <=
    first_token <= finish, first_token <= handed_off <= decode_start <= finish, and a fetch begins
    no earlier than its pull. Requests with preemptions hold last occurrences and are exempt. A
    completed request has a finish and a first token.

    Raises:
      ValueError: naming the first request that breaks a rule, or an unknown status.
    """
    main = ("arrival", "matched", "pulled", "prefill_start", "first_token", "finish")
    side = ("first_token", "handed_off", "decode_start", "finish")
    for names in (main, side, ("pulled", "fetched")):
        times = np.stack([np.asarray(getattr(t, name)) for name in names])
        latest = np.maximum.accumulate(times, axis=0)
        once = np.asarray(t.preemptions) == 0
        late = np.argwhere((times != MISSING) & (times < latest) & once)
        if late.size:
            row, request = late[0]
            raise ValueError(
                f"request {request} has {names[row]} {times[row, request]} before an earlier "
                f"stage's {latest[row, request]}: the stages must run in the order {names}"
            )
    status, done = np.asarray(t.status), np.asarray(t.status) == COMPLETED
    bare = np.flatnonzero(done & ((np.asarray(t.finish) < 0) | (np.asarray(t.first_token) < 0)))
    if bare.size:
        raise ValueError(
            f"request {bare[0]} is completed without a first token or a finish: record both times"
        )
    counts = np.array([np.sum(status == i) for i in range(len(t.statuses))])
    named = {name: int(n) for name, n in zip(t.statuses[1:], counts[1:], strict=True) if n}
    return account(
        len(status),
        int(counts[0]),
        {name: n for name, n in named.items() if name.startswith("rejected")},
        {name: n for name, n in named.items() if name.startswith("lost")},
    )
