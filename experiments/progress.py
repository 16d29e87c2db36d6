"""One line on stderr for long work, and nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

from deepinfer_jax.report.table import quantity

T = TypeVar("T")


class Progress:
    """`with Progress(1000, "requests") as bar: ... bar.step()`; silent unless stderr is a tty.

    Args:
      total: steps of the whole work; 0 if unknown.
      every: seconds between two redraws.
    """

    def __init__(self, total: int, label: str, *, stream: TextIO | None = None, every: float = 0.1):
        self.total, self.label, self.done, self.every = total, label, 0, every
        self.stream = sys.stderr if stream is None else stream
        self.visible = self.stream.isatty()
        self.began, self.drawn = time.monotonic(), float("-inf")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.visible:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def step(self, count: int = 1) -> None:
        """Adds `count` finished steps and redraws when it is time."""
        self.done += count
        now = time.monotonic()
        if self.visible and now - self.drawn >= self.every:
            self.drawn = now
            self.stream.write(f"\r\x1b[K{self.line(now - self.began)}"[:110])
            self.stream.flush()

    def line(self, seconds: float) -> str:
        """What is shown after `seconds` of work."""
        if not self.total:
            return f"{self.label}: {self.done:,} done, {quantity(seconds, 's')}"
        left = seconds * (self.total - self.done) / max(self.done, 1)
        share = quantity(min(self.done / self.total, 1.0), "%")
        return f"{self.label}: {share}, {self.done:,} of {self.total:,}, {quantity(left, 's')} left"


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yields `items` under a `Progress` line; the total is known if `items` has a length."""
    with Progress(len(items) if isinstance(items, Sized) else 0, label) as bar:
        for item in items:
            yield item
            bar.step()
