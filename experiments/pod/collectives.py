"""The collectives of a compiled program, read from its optimised text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_CALL = re.compile(
    rf"= (?P<result>.*?) (?P<kind>(?:ragged-)?(?:{'|'.join(KINDS)}))(?P<start>-start)?\("
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective of one size: how often the program text has it, and where."""

    kind: str
    result: str  # "bf16[64,24,5120]", what a device ends up with
    group: int  # devices that take part together; 0: all, or pairs
    bytes: int  # of the result on one device
    looped: bool  # within a loop's body, so once per turn
    count: int


def collectives(text: str) -> list[Collective]:
    """Those of a program, the largest first."""
    found: dict[tuple[str, str, int, int, bool], int] = defaultdict(int)
    for call in _calls(text):
        found[call] += 1
    made = [Collective(*call, count) for call, count in found.items()]
    return sorted(made, key=lambda c: (-c.bytes * c.count, c.kind, c.result))


def _calls(text: str) -> Iterator[tuple[str, str, int, int, bool]]:
    for line in text.splitlines():
        call = _CALL.search(line)
        if call is None:
            continue
        shapes = _SHAPE.findall(call["result"])
        if call["start"] and call["kind"] != "all-reduce":
            shapes = [s for s in shapes if s[1]]  # without a context's scalars:
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        result = " ".join(f"{kind}[{sizes}]" for kind, sizes in shapes)
        size = sum(item_bytes(kind) * _count(sizes) for kind, sizes in shapes)
        yield call["kind"], result, _group(line), math.ceil(size), "while/body" in line


def _group(line: str) -> int:
    groups = _GROUPS.search(line)
    if groups is None:
        return 0
    return int(groups[2]) if groups[2] else len(groups[1].split(","))


def _count(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size)


def item_bytes(kind: str) -> float:
    """Bytes of an entry of XLA's type name: "bf16", "s32", "f8e4m3fn", "s4", "pred"."""
    if kind == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", kind)
    if bits is None:
        raise ValueError(f"type {kind!r} has no width; add it to item_bytes")
    return int(bits[1]) / 8
