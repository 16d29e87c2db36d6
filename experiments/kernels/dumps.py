"""The TPU compiler's schedule of a kernel, read from two of its dumps.

`final_bundles` lists the kernel's instruction words, "bundles", one a cycle; labels and branches
show its loops. `final_hlo-static-per-bundle-utilization` says, bundle by bundle, how many of each
kind of slot are taken; a matrix unit counts as taken as long as it works on what it was given.
Written by LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true".
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:>\s*)*)\{")


class Run(NamedTuple):
    """Bundles begin .. end - 1 follow each other without label or branch, in `depth` loops."""

    begin: int
    end: int
    depth: int


class Tile(NamedTuple):
    """A long run of bundles: arithmetic that is done as often as the kernel has work for it."""

    bundles: int
    busy: dict[str, float]  # share of slots of each kind taken, of those there are


class Schedule(NamedTuple):
    """A kernel whose grid is its outermost loop."""

    bundles: int  # of the whole kernel
    tiles: tuple[Tile, ...]  # in the kernel's order
    beside: int  # bundles of the grid loop beside its tiles: pipelining, branches


def runs(final_bundles: str) -> list[Run]:
    """All straight runs of a `final_bundles` dump, in order."""
    found: list[Run] = []
    begin, depth, number = 0, 0, 0
    for line in final_bundles.splitlines():
        match = _BUNDLE.match(line)
        if not match:
            continue
        nesting = depth if "{}" in line else match[3].count(">")  # idle bundles show none
        if match[2] or nesting != depth:
            found.append(Run(begin, number, depth))
            begin, depth = number, nesting
        number += 1
        if "sbr." in line:
            found.append(Run(begin, number, depth))
            begin = number
    found.append(Run(begin, number, depth))
    return [run for run in found if run.end > run.begin]


def slots(utilisation: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(names [K], slots there are [K], slots taken [bundles, K]) of a utilisation dump."""
    lines = utilisation.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    there = np.array([int(n) for n in lines[2].split()])
    taken = [[int(n) for n in line.split()] for line in lines[4:] if re.fullmatch(r"[\d ]+", line)]
    return names, there, np.array(taken).reshape(-1, len(names))


def schedule(final_bundles: str, utilisation: str, tiles: int = 1) -> Schedule:
    """Both dumps of one kernel together; its `tiles` longest runs are its tiles.

    Raises:
      ValueError: they are not of the same kernel.
    """
    found = runs(final_bundles)
    names, there, taken = slots(utilisation)
    if found[-1].end != len(taken):
        raise ValueError(
            f"{found[-1].end} bundles but {len(taken)} rows of utilisation; take both files from "
            "one compilation of one kernel"
        )
    longest = sorted(found, key=lambda run: run.begin - run.end)[:tiles]
    made = []
    for run in sorted(longest):
        share = taken[run.begin : run.end].mean(0) / there
        busy = {name: round(float(part), 3) for name, part in zip(names, share, strict=True)}
        made.append(Tile(run.end - run.begin, busy))
    looped = sum(run.end - run.begin for run in found if run.depth > 0 and run not in longest)
    return Schedule(len(taken), tuple(made), looped)
