"""A compiled TPU program's text, read: the compiler's own estimate of cycles, and bytes of HBM.

The text is `compiled.as_text()`. An array in memory space 1 lies in VMEM and costs no HBM bytes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pallas_kernels.traffic import tile_bytes

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]\{([^}]*)\}")
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "copy-done")
_KERNEL = 'custom_call_target="tpu_custom_call"'


class Cost(NamedTuple):
    """Of a program without its kernels."""

    cycles: int  # the compiler's estimate, loops times their iterations; gathers have none
    hbm_bytes: int  # loop bodies once: what a loop slices, it slices from an array counted whole


def computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation by name, the program's own as "ENTRY"."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = "ENTRY" if line.startswith("ENTRY") else line[1:].split()[0]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def cost(text: str) -> Cost:
    """What the program's own instructions take, kernels apart."""
    return _cost(computations(text), "ENTRY")


def kernels(text: str) -> list[str]:
    """Names of the kernels that the program calls."""
    lines = [line for line in text.splitlines() if _KERNEL in line]
    return [match[1] for line in lines if (match := _INSTRUCTION.match(line))]


def scoped_vmem(text: str) -> int:
    """Bytes of VMEM that the greatest kernel takes for itself."""
    sizes = [
        int(size)
        for line in text.splitlines()
        if _KERNEL in line
        for size in re.findall(r'"used_scoped_memory_configs":\[{[^]]*?"size":"(\d+)"', line)
    ]
    return max(sizes, default=0)


def _cost(parts: dict[str, list[str]], name: str) -> Cost:
    sizes: dict[str, int] = {}
    cycles = moved = 0
    for line in parts[name]:
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        shape, operation, operands = _split(match[2])
        sizes[match[1]] = _bytes(shape)
        if operation == "while":
            body = re.search(r"body=%([\w.\-]+)", line)
            condition = re.search(r"condition=%([\w.\-]+)", line)
            assert body and condition
            inner = _cost(parts, body[1])
            cycles += inner.cycles * _trips(parts[condition[1]])
            moved += inner.hbm_bytes
        if operation in _FREE or _KERNEL in line:
            continue
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        cycles += int(estimate[1]) if estimate else 0
        moved += sizes[match[1]] + sum(sizes.get(operand, 0) for operand in operands)
    return Cost(cycles, moved)


def _split(rest: str) -> tuple[str, str, list[str]]:
    """(result, operation, operand names) of an instruction behind its "="."""
    match = re.match(r"(\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)", rest)
    if not match:
        return rest, "", []
    return match[1], match[2], re.findall(r"%([\w.\-]+)", match[3])


def _bytes(result: str) -> int:
    """HBM bytes of an instruction's result, a tuple or an array."""
    total = 0
    for kind, dimensions, layout in _ARRAY.findall(result):
        bits = re.search(r"\d+", kind)
        itemsize = max(1, int(bits[0]) // 8) if bits else 1
        if "S(" not in layout:
            order = [int(n) for n in layout.split(":")[0].split(",") if n]
            shape = [int(n) for n in dimensions.split(",") if n]
            total += tile_bytes([shape[axis] for axis in reversed(order)], itemsize)
    return total


def _trips(condition: list[str]) -> int:
    """Iterations of a loop whose condition compares its counter with a constant; 1 if unclear."""
    found = [
        int(n) for line in condition for n in re.findall(r"s32\[\]\S* constant\((\d+)\)", line)
    ]
    return found[0] if len(found) == 1 else 1
