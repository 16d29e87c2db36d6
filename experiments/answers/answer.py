"""What every exercise hands over: a prediction made before any run, then the answer with its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_jax.report.page import Plot, Table


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Computed from formulas alone: a paragraph, and the numbers in it for the comparison."""

    text: str
    values: Mapping[Any, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the runs said: a paragraph, tables, one figure, and the numbers for summary.json."""

    text: str
    tables: list[Table]
    plots: list[Plot]
    summary: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One question. Both functions take the exercise's section of the config and the seed."""

    question: str
    predict: Callable[[Mapping[str, Any], int], Prediction]
    answer: Callable[[Mapping[str, Any], int, Prediction], Answer]
