"""Row parsers of the public trace formats: one record in, one checked `Row` out."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.traces import LARGEST_LENGTH

Record = Mapping[str, Any]
MILLISECOND = TICKS_PER_SECOND // 1000
LARGEST_ID = 2**62


class Row(NamedTuple):
    """One request as read. Times in ticks, lengths in tokens."""

    arrival: int
    input_tokens: int
    output_tokens: int
    blocks: list[Any] | None = None  # one id per block
    runs: list[list[int]] | None = None  # the same as [first, count]
    images: tuple[int, ...] = ()
    session: str | None = None
    parent: str | None = None  # an earlier row's `session`, whose session this row continues
    turn: int | None = None
    think_seconds: float = math.nan
    answer_seconds: float = math.nan
    common: tuple[int, int] = (0, 0)  # tokens of the tools and of the system prompt at the start
    traffic: int | None = None  # traffic class


class BadRow(Exception):
    """A value that breaks a rule: `field`, `value`, `rule`."""

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(field, value, rule)
        self.field, self.value, self.rule = field, value, rule


def field(record: Record, name: str) -> Any:
    """`record[name]`, which must be there and not be empty."""
    value = record.get(name)
    if value is None or value == "":
        raise BadRow(name, "missing", f"the row needs a {name}")
    return value


def number(record: Record, name: str) -> Decimal:
    """A finite number, exactly as written."""
    value = field(record, name)
    try:
        exact = value if isinstance(value, Decimal) else Decimal(str(value))
    except InvalidOperation:
        raise BadRow(name, value, "must be a number") from None
    if not exact.is_finite():
        raise BadRow(name, value, "must be a finite number")
    return exact


def whole(record: Record, name: str, least: int) -> int:
    """An integer in [least, 2**31 - 1]."""
    value = record.get(name)
    if type(value) is not int:
        exact = number(record, name)
        if abs(exact) <= LARGEST_LENGTH and exact != int(exact):
            raise BadRow(name, value, "must be a whole number")
        value = int(exact) if abs(exact) <= LARGEST_LENGTH else value
    if not isinstance(value, int) or not least <= value <= LARGEST_LENGTH:
        raise BadRow(name, value, f"must be from {least} to {LARGEST_LENGTH}")
    return value


def ticks(record: Record, name: str, unit: int) -> int:
    """A non-negative time in ticks; `unit` is the ticks of one."""
    value = record.get(name)
    exact: int | Decimal = value * unit if type(value) is int else number(record, name) * unit
    if exact < 0:
        raise BadRow(name, value, "a time must not be negative")
    if exact >= LARGEST_ID:
        raise BadRow(name, value, f"a time must stay below {LARGEST_ID // TICKS_PER_SECOND} s")
    return round(exact)


def tokens(values: object, name: str) -> tuple[int, ...]:
    """Token counts separated by semicolons; empty means none."""
    parts = [part for part in str(values or "").split(";") if part]
    return tuple(whole({name: part}, name, 1) for part in parts)


_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


def clock(record: Record, name: str) -> int:
    """Ticks since 1970 of a calendar time with up to nine fractional digits; no zone means UTC."""
    text = str(field(record, name))
    match = _CLOCK.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise BadRow(name, text, "must look like 2023-11-16 18:15:46.6805900") from None
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    seconds = since.days * 86_400 + since.seconds
    return seconds * TICKS_PER_SECOND + int((match[2] or "").ljust(9, "0"))


def chain(record: Record, block_tokens: int) -> list[Any]:
    """`hash_ids`: at most one id per `block_tokens` of the prompt."""
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) in (int, str) for i in ids):
        raise BadRow("hash_ids", str(ids)[:40], "must be a list of integers or strings")
    _check_covered("hash_ids", len(ids), whole(record, "input_length", 1), block_tokens)
    return ids


def _check_covered(name: str, blocks: int, prompt: int, block_tokens: int) -> None:
    most = -(-prompt // block_tokens)
    if blocks > most:
        rule = f"a prompt of {prompt} tokens has {most} blocks of {block_tokens} tokens"
        raise BadRow(name, f"{blocks} blocks", rule)


def _plain(record: Record, block_tokens: int) -> Row:
    return Row(
        ticks(record, "timestamp", MILLISECOND),
        whole(record, "input_length", 1),
        whole(record, "output_length", 1),
        blocks=chain(record, block_tokens) if block_tokens and "hash_ids" in record else None,
        session=None if record.get("session_id") is None else str(record["session_id"]),
        turn=whole(record, "turn", 0) if "turn" in record else None,
        traffic=whole(record, "traffic", 0) if "traffic" in record else None,
    )


def _bailian(record: Record, block_tokens: int) -> Row:
    parent = record.get("parent_chat_id")
    return Row(
        ticks(record, "timestamp", TICKS_PER_SECOND),
        whole(record, "input_length", 1),
        whole(record, "output_length", 1),
        blocks=chain(record, block_tokens),
        session=str(field(record, "chat_id")),
        parent=None if parent in (None, -1) else str(parent),
        turn=whole(record, "turn", 0) if "turn" in record else None,
    )


def _sessions(record: Record, block_tokens: int) -> Row:
    prompt = whole(record, "input_length", 1)
    runs = field(record, "hash_runs")
    shape = isinstance(runs, list) and all(isinstance(r, list) and len(r) == 2 for r in runs)
    if not shape or not all(type(n) is int for r in runs for n in r) or any(r[1] < 1 for r in runs):
        raise BadRow("hash_runs", str(runs)[:40], "must be a list of [first id, count >= 1]")
    _check_covered("hash_runs", sum(n for _, n in runs), prompt, block_tokens)
    common = (whole(record, "tool_tokens", 0), whole(record, "system_tokens", 0))
    think, answer = record.get("think_time"), record.get("api_time")
    return Row(
        ticks(record, "timestamp", MILLISECOND),
        prompt,
        whole(record, "output_length", 1),
        runs=runs,
        session=str(field(record, "session_id")),
        turn=whole(record, "turn", 0),
        think_seconds=math.nan if think is None else float(number(record, "think_time")),
        answer_seconds=math.nan if answer is None else float(number(record, "api_time")),
        common=common,
    )


def _vllm(record: Record, block_tokens: int) -> Row:
    del block_tokens
    return Row(
        ticks(record, "arrival_time", TICKS_PER_SECOND),
        whole(record, "input_toks", 1),
        whole(record, "output_toks", 1),
    )


def _azure(record: Record, block_tokens: int) -> Row:
    del block_tokens
    return Row(
        clock(record, "TIMESTAMP"),
        whole(record, "ContextTokens", 1),
        whole(record, "GeneratedTokens", 1),
    )


def _burstgpt(record: Record, block_tokens: int) -> Row:
    del block_tokens
    return Row(
        ticks(record, "Timestamp", TICKS_PER_SECOND),
        whole(record, "Request tokens", 1),
        whole(record, "Response tokens", 1),
    )


def _servegen(record: Record, block_tokens: int) -> Row:
    del block_tokens
    arrival = ticks(record, "timestamp", TICKS_PER_SECOND)
    answer = whole(record, "output_tokens", 1)
    if "input_tokens" in record:
        return Row(arrival, whole(record, "input_tokens", 1), answer)
    images = tokens(record.get("image_tokens"), "image_tokens")
    others = [tokens(record.get(name), name) for name in ("audio_tokens", "video_tokens")]
    text = whole(record, "text_tokens", 0)
    prompt = text + sum(images) + sum(map(sum, others))
    return Row(
        arrival,
        whole({"text_tokens + media": prompt}, "text_tokens + media", 1),
        answer,
        images=images,
    )


@dataclasses.dataclass(frozen=True)
class Format:
    """How one public trace format looks and reads.

    `fields` identify it, `block_tokens` is the length of its prefix blocks (0: none), `absolute`
    says that its clock is a calendar, so that the first arrival becomes time 0.
    """

    kind: str  # "jsonl" or "csv"
    fields: tuple[str, ...]
    parse: Callable[[Record, int], Row]
    block_tokens: int = 0
    absolute: bool = False


FORMATS: Mapping[str, Format] = {
    # KV-cache-tester sessions with run-length coded 64-token blocks, see configs/traces/README.md.
    "sessions": Format("jsonl", ("timestamp", "input_length", "hash_runs"), _sessions, 64),
    # Qwen-Bailian usage traces: seconds, 16-token blocks, chats linked by parent_chat_id.
    "bailian": Format("jsonl", ("timestamp", "chat_id", "hash_ids"), _bailian, 16),
    # Mooncake (FAST'25): milliseconds, 512-token blocks.
    "mooncake": Format("jsonl", ("timestamp", "input_length", "hash_ids"), _plain, 512),
    # LLMServingSim's records of real vLLM runs.
    "vllm": Format("jsonl", ("arrival_time", "input_toks"), _vllm, absolute=True),
    # Our own: {timestamp (ms), input_length, output_length}, if need be traffic (class, from 0).
    "plain": Format("jsonl", ("timestamp", "input_length", "output_length"), _plain),
    # Azure LLM inference traces 2023 and 2024.
    "azure": Format("csv", ("TIMESTAMP", "ContextTokens"), _azure, absolute=True),
    "burstgpt": Format("csv", ("Timestamp", "Request tokens"), _burstgpt),
    # ServeGen: input_tokens, or text_tokens beside ;-separated image, audio and video tokens.
    "servegen": Format("csv", ("timestamp", "output_tokens"), _servegen),
}
"""In the order in which `guess` tries them: the more particular first."""


def listed() -> str:
    """The formats with the fields that tell them apart, for error messages."""
    return "; ".join(f"{name} ({f.kind}: {', '.join(f.fields)})" for name, f in FORMATS.items())


def guess(kind: str, names: set[str]) -> str | None:
    """The first format of this kind whose fields are all among `names`."""
    fits = (n for n, f in FORMATS.items() if f.kind == kind and names.issuperset(f.fields))
    return next(fits, None)
