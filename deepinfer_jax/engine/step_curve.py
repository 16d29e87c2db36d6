"""Time of a decode step by its rows: measured once, kept in a file, corrected while it runs.

The file is JSON {key, sizes, milliseconds, written}. `key` digests what determines the times. Any
other key, an old file or one that does not parse is measured anew. Times in milliseconds.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_jax.rules import require

WINDOW, LEAST_RESIDUALS = 5000, 10


@dataclasses.dataclass(frozen=True)
class StepCurve:
    """Milliseconds of a step padded to each of `sizes`, ascending row counts."""

    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        increasing = all(a < b for a, b in itertools.pairwise(self.sizes))
        require(
            len(self.sizes) == len(self.milliseconds) > 0 and increasing,
            f"sizes {self.sizes} with times {self.milliseconds}; give one time per ascending size",
        )
        require(
            all(0 < t < float("inf") for t in self.milliseconds),
            f"times are {self.milliseconds}; they must be positive, so measure them again",
        )

    def size(self, rows: int) -> int:
        """The smallest measured size that holds `rows`."""
        at = bisect.bisect_left(self.sizes, rows)
        require(at < len(self.sizes), f"{rows} rows exceed {self.sizes[-1]}; measure that size too")
        return self.sizes[at]

    def base(self, rows: int) -> float:
        """Measured time of a step of `rows`."""
        return self.milliseconds[self.sizes.index(self.size(rows))]

    def times(self, low: int, high: int, slope: float = 0.0) -> list[float]:
        """Time of low, ..., high rows: measured + max(0, slope) * size."""
        return [self.base(r) + max(0.0, slope) * self.size(r) for r in range(low, high + 1)]


def middle_mean(samples: Sequence[float]) -> float:
    """Mean without the least and the greatest of at least 3 samples."""
    require(len(samples) >= 3, f"{len(samples)} samples; time a size at least 3 times")
    return statistics.fmean(sorted(samples)[1:-1])


class Drift:
    """What running steps say beyond the curve: a slope per row."""

    def __init__(self) -> None:
        self._residuals: collections.deque[tuple[int, float]] = collections.deque(maxlen=WINDOW)

    def record(self, curve: StepCurve, rows: int, milliseconds: float) -> None:
        """What a decode step took."""
        size = curve.size(rows)
        self._residuals.append((size, (milliseconds - curve.base(rows)) / size))

    @property
    def slope(self) -> float:
        """Median over sizes, each seen 10 times or more, of their median residual per row."""
        by_size: dict[int, list[float]] = {}
        for size, residual in self._residuals:
            by_size.setdefault(size, []).append(residual)
        medians = [statistics.median(v) for v in by_size.values() if len(v) >= LEAST_RESIDUALS]
        return statistics.median(medians) if medians else 0.0


def digest(determines: Mapping[str, Any]) -> str:
    """Key of a curve: sha256 of what determines it (device, model, sizes, mesh), as JSON."""
    text = json.dumps(determines, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: pathlib.Path, key: str, oldest: float) -> StepCurve | None:
    """The curve of `key` written at time `oldest` or later; None, with a warning if corrupt."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        if found["key"] != key or found["written"] < oldest:
            return None
        return StepCurve(tuple(found["sizes"]), tuple(found["milliseconds"]))
    except (ValueError, KeyError, TypeError, OSError) as error:
        logging.warning("step curve %s is unreadable (%s); it is measured anew", path, error)
        return None


def store(path: pathlib.Path, key: str, curve: StepCurve) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"key": key, "written": time.time(), **dataclasses.asdict(curve)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(record, file)
    os.replace(file.name, path)


def load_or_measure(
    path: pathlib.Path, key: str, measure: Callable[[], StepCurve], lifetime: float = 3600.0
) -> StepCurve:
    """The stored curve if it is younger than `lifetime` seconds, else a new one, stored."""
    known = load(path, key, time.time() - lifetime)
    if known is None:
        known = measure()
        store(path, key, known)
    return known
