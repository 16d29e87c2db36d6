"""Step times from measured kernel tables, and the affine `StepCost` closest to them.

The tables are those of LLMServingSim's profiler: seconds of one layer's kernels by tokens (dense),
by activated experts (moe), by sequences (the head) and of attention on a four-dimensional grid.
Every lookup outside a table takes the table's edge (dense: the last slope) and is counted.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import gzip
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from deepinfer_jax.cost.quota import non_negative_least_squares
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, StepCost

MICROSECOND = 1e-6
ONCE = ("embedding", "final_layernorm")  # per step; every other dense layer once per model layer
TWICE = "layernorm"  # before attention and before the feed-forward part


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What the tables do not say about a model: layers, hidden size and sizes in bytes."""

    layers: int
    hidden: int
    kv_bytes_per_token: int
    weight_bytes: float
    experts: int = 0
    active: int = 0


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, plain or with .gz added to its name.

    Raises:
      ValueError: there is neither.
    """
    packed = path.with_name(path.name + ".gz")
    if packed.is_file():
        with gzip.open(packed, "rt") as file:
            return list(csv.DictReader(file))
    if not path.is_file():
        raise ValueError(f"{path} is missing: a run needs profile/ with its kernel tables")
    with path.open() as file:
        return list(csv.DictReader(file))


def _curves(table: Sequence[Mapping[str, str]], key: str) -> dict[str, np.ndarray]:
    found = collections.defaultdict(list)
    for row in table:
        found[row["layer"]].append((float(row[key]), float(row["time_us"]) * MICROSECOND))
    return {name: np.asarray(sorted(points)) for name, points in found.items()}


class Profile:
    """Seconds of one rank's step, read from the tables of a directory.

    `outside` counts the lookups beyond a table by what went beyond it.
    """

    def __init__(self, folder: pathlib.Path, model: Decoder, ranks: int = 1) -> None:
        self.model, self.ranks = model, ranks
        self.outside: collections.Counter[str] = collections.Counter()
        self.dense = _curves(rows(folder / "dense.csv"), "tokens")
        self.head = _curves(rows(folder / "per_sequence.csv"), "sequences")
        self.axes, self.grid = _attention(rows(folder / "attention.csv"))
        self.experts: dict[float, np.ndarray] = {}
        if model.experts:
            for row in rows(folder / "moe.csv"):
                point = (float(row["tokens"]), float(row["time_us"]) * MICROSECOND)
                known = self.experts.get(float(row["activated_experts"]), np.zeros((0, 2)))
                self.experts[float(row["activated_experts"])] = np.vstack([known, point])

    def seconds(self, new: float, cached: float, requests: float, context: float) -> float:
        """One step: a chunk of `new` tokens over `cached`, and `requests` decode rows over `context` each."""
        tokens, sequences = new + requests, requests + (new > 0)
        once = sum(self._curve(n, c, tokens) for n, c in self.dense.items() if n in ONCE)
        once += sum(self._curve(n, c, sequences) for n, c in self.head.items())
        layer = sum(
            self._curve(n, c, tokens) * (2 if n == TWICE else 1)
            for n, c in self.dense.items()
            if n not in ONCE
        )
        layer += self.attention((new, cached, requests, context)) + self._moe(tokens)
        return once + self.model.layers * layer

    def _curve(self, name: str, curve: np.ndarray, x: float) -> float:
        if x > curve[-1, 0]:
            self.outside[f"{name}: {curve[-1, 0]:.0f} is the table's end"] += 1
            (a, fa), (b, fb) = curve[-2], curve[-1]
            return float(fb + (fb - fa) / (b - a) * (x - b))
        return float(np.interp(x, curve[:, 0], curve[:, 1]))

    def attention(self, point: Sequence[float]) -> float:
        """Multilinear on the grid; a cell that was not measured counts as outside."""
        low, share = [], []
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        for axis, x, name in zip(self.axes, point, names, strict=True):
            if x > axis[-1]:
                self.outside[f"attention {name}: {axis[-1]:.0f} is the table's end"] += 1
            x = min(x, axis[-1])
            i = int(np.clip(np.searchsorted(axis, x, "right") - 1, 0, len(axis) - 2))
            low.append(i)
            share.append((x - axis[i]) / (axis[i + 1] - axis[i]))
        total = weight = 0.0
        for corner in np.ndindex(2, 2, 2, 2):
            w = float(np.prod([s if c else 1 - s for s, c in zip(share, corner, strict=True)]))
            value = self.grid[tuple(i + c for i, c in zip(low, corner, strict=True))]
            if w and not np.isnan(value):
                total, weight = total + w * value, weight + w
        if weight < 1 - 1e-9:
            self.outside["attention: a corner of the cell was not measured"] += 1
        if not weight:
            return float("nan")
        return total / weight

    def _moe(self, tokens: float) -> float:
        """A rank's experts see its share of all ranks' tokens, `active` pairs each."""
        if not self.experts or not tokens:
            return 0.0
        here = self.model.experts / self.ranks
        missed = (1 - self.model.active / self.model.experts) ** (tokens * self.ranks)
        touched = max(here * (1 - missed), self.model.active)
        counts = np.asarray(sorted(self.experts))
        values = [self._curve(f"moe {c:.0f}", self.experts[c], tokens) for c in counts]
        return float(np.interp(touched, counts, values))


def _attention(table: Sequence[Mapping[str, str]]) -> tuple[list[np.ndarray], np.ndarray]:
    """(axes of the regular grid, seconds on it, NaN where unmeasured).

    An axis keeps 0 and the powers of two; the few points between them were measured for other studies.
    """
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    points = np.asarray([[float(row[n]) for n in names] for row in table])
    seconds = np.asarray([float(row["time_us"]) for row in table]) * MICROSECOND
    regular = np.all((points == 0) | (np.log2(np.maximum(points, 1)) % 1 == 0), axis=1)
    points, seconds = points[regular], seconds[regular]
    axes = [np.unique(column) for column in points.T]
    grid = np.full([len(axis) for axis in axes], np.nan)
    index = [np.searchsorted(axis, column) for axis, column in zip(axes, points.T, strict=True)]
    grid[tuple(index)] = seconds
    # No decode rows have no context, no chunk has no cached tokens: such cells repeat along them.
    grid[:, :, 0, 1:] = grid[:, :, 0, :1]
    grid[0, 1:] = grid[0, :1]
    for axis in (1, 3):  # context 0 of something present: the shortest measured one
        first = [slice(None)] * 4
        second = list(first)
        first[axis], second[axis] = 0, 1  # type: ignore[call-overload]
        hole = np.isnan(grid[tuple(first)])
        grid[tuple(first)][hole] = grid[tuple(second)][hole]
    grid[0, :, 0] = 0.0
    return axes, grid


def _max_affine(columns: np.ndarray, target: np.ndarray, most: int) -> np.ndarray:
    """[F, n] at most `most` non-negative affine forms whose maximum is near `target` relatively.

    Each form is fitted where it leads, and what leads is found anew. One form is tried as well: a
    concave curve, as of experts that fill up, has no better maximum of several.
    """
    order = np.argsort(np.argsort(columns[:, 1], kind="stable"), kind="stable")
    best, best_loss = np.zeros((1, columns.shape[1])), np.inf
    for forms in range(1, most + 1):
        part = order * forms // len(target)
        for _ in range(20):
            groups = [part == f for f in range(forms) if (part == f).any()]
            fitted = np.stack(
                [
                    non_negative_least_squares(
                        columns[group] / target[group, None], np.ones(group.sum())
                    )
                    for group in groups
                ]
            )
            values = columns @ fitted.T
            loss = float(np.sum((values.max(axis=1) / target - 1) ** 2))
            if loss < best_loss:
                best, best_loss = fitted, loss
            part = values.argmax(axis=1)
    return best


@dataclasses.dataclass(frozen=True)
class TableFit:
    """The step model of a profile and how far it is from the tables: relative medians."""

    cost: StepCost
    decode_error: float
    mixed_error: float
    samples: int


def fit(
    profile: Profile,
    slots: int,
    budget: int,
    exchange_row: float = 0.0,
    exchange_base: float = 0.0,
    forms: int = 3,
) -> TableFit:
    """`StepCost` of a mixed worker of `slots` running requests and `budget` tokens a step.

    A prompt chunk is charged what it adds to the decode rows it travels with.

    Args:
      exchange_row, exchange_base: seconds of the ranks' exchange per row of all ranks, per step.
    """
    counts = np.unique(np.geomspace(1, slots, 14).astype(int))
    contexts = (128, 256, 512, 1024, 1536, 2048, 4096)
    samples = [(n, k) for n in counts for k in contexts]
    decode = np.asarray([profile.seconds(0, 0, n, k) for n, k in samples])
    known = ~np.isnan(decode)
    columns = np.asarray([(1.0, n, n * k) for n, k in samples])[known]
    affine = _max_affine(columns, decode[known], forms)
    decode_error = np.median(np.abs((columns @ affine.T).max(axis=1) / decode[known] - 1))
    matrix, added, whole, alone = [], [], [], []
    for n in (0, slots // 8, slots // 4, slots // 2, slots):
        for q in (64, 128, 256, 512, 1024, max(budget - n, 1)):
            for c in (0, 1024, 2048):
                rest = profile.seconds(0, 0, n, 1024) if n else 0.0
                total = profile.seconds(q, c, n, 1024 if n else 0)
                if q + n <= budget and not np.isnan(total):
                    matrix.append((1.0, q, q * c + q * (q + 1) / 2, c))
                    added.append(max(total - rest, 0.0))
                    whole.append(total)
                    alone.append(rest)
    weights = np.asarray(whole)
    chunk = non_negative_least_squares(np.asarray(matrix) / weights[:, None], added / weights)
    mixed = np.abs((np.asarray(matrix) @ chunk + alone) / weights - 1)
    unit = lambda x: round(float(x) * FEMTOSECONDS_PER_SECOND)  # noqa: E731
    cost = StepCost(
        prefill_base=unit(chunk[0]),
        prefill_token=unit(chunk[1]),
        prefill_pair=unit(chunk[2]),
        prefill_context=unit(chunk[3]),
        prefill_exchange_base=0,
        prefill_exchange_token=unit(exchange_row),
        decode_forms=np.rint(affine * FEMTOSECONDS_PER_SECOND).astype(np.int64),
        decode_exchange_base=unit(exchange_base),
        decode_exchange_row=unit(exchange_row),
    )
    return TableFit(cost, float(decode_error), float(np.median(mixed)), len(samples) + len(added))
