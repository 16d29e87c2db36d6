"""Where a reference was within a hair of deciding otherwise, and from which position that matters.

Three decisions are discrete: the k best experts, the k best rows or candidate blocks, and the code
a value rounds to. Two correct float32 implementations may decide a near-tie differently, and every
position from there on may then differ by any amount. The margins come from NeMo's forward pass, not
from the model under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nemo_automodel.components.models.deepseek_v41 import attention
from torch.overrides import TorchFunctionMode

CODE_SLACK = 1e-5  # of the root mean square of a row: how far float32 noise may move a value; it
# depends on the machine's vector width, and moved one by 6e-6 where we and both references differ
CHOICE_SLACK = 1e-5  # in units of a score: how far it may move a score
QUERY_SLACK = 0.05  # of the largest score: what one other code of an index query may move


@dataclasses.dataclass
class Doubts:
    """Per position, what was undecided there: `reasons[name]` is a mask [T]."""

    length: int
    reasons: dict[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, mask: torch.Tensor) -> None:
        """Mark the positions of `mask` [T] (a compressing layer's mask has fewer, later rows)."""
        known = self.reasons.setdefault(name, np.zeros(self.length, bool))
        known |= mask.numpy()

    @property
    def first(self) -> int:
        """The earliest doubtful position; `length` if there is none."""
        return min(self.why().values(), default=self.length)

    def why(self) -> dict[str, int]:
        """The first position of each kind of doubt."""
        return {k: int(np.argmax(v)) for k, v in self.reasons.items() if v.any()}


class _Choices(TorchFunctionMode):
    """Watches every top-k of a forward pass; `queries` are positions whose index query is unsure."""

    def __init__(self, doubts: Doubts) -> None:
        super().__init__()
        self.doubts = doubts
        self.queries = torch.zeros(doubts.length, dtype=torch.bool)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Measure the margin of a top-k, then do what was asked."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            self._measure(args[0], args[1] if len(args) > 1 else kwargs["k"])
        return func(*args, **kwargs)

    def _measure(self, scores: torch.Tensor, k: int) -> None:
        rows = scores.reshape(-1, scores.shape[-1])
        if k >= rows.shape[-1]:
            return
        ordered = rows.sort(-1, descending=True).values
        gap = ordered[:, k - 1] - ordered[:, k]
        gap = torch.where(torch.isfinite(gap), gap, torch.inf)
        if scores.ndim == 2:
            self.doubts.add("expert", gap < CHOICE_SLACK)
            return
        finite = torch.where(torch.isfinite(rows), rows.abs(), 0.0).amax(-1)
        self.doubts.add("choice", gap < CHOICE_SLACK)
        self.doubts.add("query", self.queries & (gap < QUERY_SLACK * finite))


@contextlib.contextmanager
def watched(length: int) -> Iterator[Doubts]:
    """Collect the doubts of one NeMo forward pass over `length` tokens, one sequence."""
    doubts = Doubts(length)
    choices = _Choices(doubts)
    original = attention.quantize_cache

    def watching(values: torch.Tensor, **how: Any) -> torch.Tensor:
        out = original(values, **how)
        if out is values:  # rounding is off
            return out
        moved = values.square().mean(-1, keepdim=True).sqrt() * CODE_SLACK
        low, high = (original(values + sign * moved, **how) for sign in (-1, 1))
        unsure = (low != high).flatten(2).any(-1)[0]
        if values.ndim == 4:
            choices.queries = unsure
        else:
            ratio = length // values.shape[1]
            at = torch.zeros(length, dtype=torch.bool)
            at[ratio - 1 : ratio * values.shape[1] : ratio] = unsure
            doubts.add(how["format"], at)
        return out

    attention.quantize_cache = watching
    try:
        with choices:
            yield doubts
    finally:
        attention.quantize_cache = original
