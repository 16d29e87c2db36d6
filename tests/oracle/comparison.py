"""One model and one prompt in every way a service runs a model, by us and by both references.

NeMo runs whole sequences only, so its one pass is the truth for all ways; mlx-lm takes the same steps
as we do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.config import ModelConfig
from tests.oracle import margins, mlx, nemo, ours
from tests.oracle.agreement import Tally
from tests.oracle.random_weights import random_parameters

Array = npt.NDArray[Any]

LENGTH = 40
WAYS: dict[str, list[list[int]]] = {
    "prefill": [[LENGTH]],
    "chunked": [[11, 6, 6, 1, 3], [1, 2, 3, 4, 5, 6, 7], [12, 1, 12, 1], [5, 5, 5, 5, 5, 5]],
    "decode": [[1] * LENGTH],
    "verify": [[]],  # lengths are drawn
}
QUICK = WAYS | {"chunked": WAYS["chunked"][:2]}
VERIFIED = 6  # rows of a verify step


@dataclasses.dataclass
class Subject:
    """What is compared: our parameters, the prompt, NeMo's logits of it and mlx-lm's model."""

    config: ModelConfig
    seed: int
    rounding: bool
    params: Any
    ids: Array
    truth: Array
    doubts: margins.Doubts
    other: Any

    def take(self, lengths: list[int]) -> tuple[Array, Array | None]:
        """Our logits and mlx-lm's of the prompt in chunks of `lengths`, then of CHUNK."""
        if lengths == [LENGTH]:
            mine, _ = ours.prompt(self.params, self.config, self.ids, rounding=self.rounding)
        else:
            mine = ours.in_chunks(
                self.params, self.config, self.ids, lengths, rounding=self.rounding
            )
        if self.other is None:
            return mine, None
        theirs = mlx.in_chunks(self.other, self.ids, [*lengths, *[ours.CHUNK] * LENGTH])
        return mine, theirs

    def verify(self) -> tuple[Array, Array | None]:
        """The same in verify steps of which a random number of rows, at least one, is accepted.

        All rows are written, the rejected with wrong tokens; the next step starts behind the
        accepted. mlx-lm is rolled back to a snapshot and takes the accepted rows alone.
        """
        dice, config, ids = np.random.default_rng(self.seed + 100), self.config, self.ids
        step = {"rounding": self.rounding}
        memory, at = ours.empty(config, LENGTH), 9
        mine, memory = ours.extend(self.params, config, memory, ids, 0, at, ours.CHUNK, **step)
        cache = self.other.make_cache() if self.other else None
        rows, theirs = [mine], [mlx.extend(self.other, cache, ids[:at])] if self.other else []
        while at + VERIFIED <= LENGTH:
            accepted, end = int(dice.integers(1, VERIFIED + 1)), at + VERIFIED
            guess = ids.copy()
            wrong = dice.integers(0, config.vocab_size, VERIFIED - accepted)
            guess[at + accepted : end] = wrong
            mine, memory = ours.extend(
                self.params, config, memory, guess, at, VERIFIED, ours.CHUNK, **step
            )
            rows.append(mine[:accepted])
            if self.other:
                mlx.extend(self.other, mlx.snapshot(cache), guess[at:end])
                theirs.append(mlx.extend(self.other, cache, ids[at : at + accepted]))
            at += accepted
        return np.concatenate(rows), np.concatenate(theirs) if theirs else None


@contextlib.contextmanager
def subject(config: ModelConfig, seed: int, rounding: bool) -> Iterator[Subject]:
    """Random weights in all three implementations."""
    weights = random_parameters(config, seed)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, LENGTH)
    with nemo.rounding(rounding), mlx.rounding(rounding):
        model = nemo.backbone(config, weights)
        with margins.watched(LENGTH) as doubts:
            truth = nemo.logits(model, ids)
        other = None if config.engram else mlx.backbone(config, weights)
        params = jax.tree.map(jnp.asarray, weights)
        yield Subject(config, seed, rounding, params, ids, truth, doubts, other)


class Scores(collections.defaultdict[tuple[str, str], Tally]):
    """A tally per (reference, way)."""

    def __init__(self) -> None:
        super().__init__(Tally)

    def check(self, rounding: bool) -> None:
        """Near-ties excuse few rows; without rounding, none."""
        for tally in self.values():
            assert rounding or not tally.excused, tally.notes
        whole = Tally()
        for tally in self.values():
            whole.rows += tally.rows
            whole.excused += tally.excused
            whole.notes += tally.notes
        whole.check()

    def record(self) -> dict[str, dict[str, dict[str, float]]]:
        """{reference: {way: counts}}."""
        made: dict[str, dict[str, dict[str, float]]] = {}
        for (reference, way), tally in self.items():
            made.setdefault(reference, {})[way] = tally.record()
        return made


def compare(
    config: ModelConfig,
    seeds: Iterable[int],
    rounding: bool,
    ways: dict[str, list[list[int]]] = WAYS,
    scores: Scores | None = None,
) -> Scores:
    """All `ways` for all `seeds`, added to `scores`."""
    scores = Scores() if scores is None else scores
    for seed in seeds:
        with subject(config, seed, rounding) as one:
            for way, splits in ways.items():
                for lengths in splits:
                    mine, theirs = one.verify() if way == "verify" else one.take(lengths)
                    where = f"seed {seed}, rounding {rounding}, {way} {lengths}"
                    truth = one.truth[: len(mine)]
                    scores["NeMo", way].judge(mine, truth, one.doubts, f"NeMo, {where}")
                    if theirs is not None:
                        scores["mlx-lm", way].judge(mine, theirs, one.doubts, f"mlx-lm, {where}")
    return scores
