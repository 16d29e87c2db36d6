"""Greedy decoding on a paged memory: chunks of a prompt, single steps, or drafts and their check.

One request, three compiled programs of fixed shape. What a rejected draft leaves in the memory is
overwritten by the next step, which starts at the first rejected position.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.model import backbone, draft
from deepinfer_jax.model.rows import text_rows

BLOCK_TOKENS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What one step found: `tokens[: accepted + 1]` are new, the last one not yet in memory."""

    tokens: jax.Array  # int32 [N + 1] most likely token after each verified row
    accepted: jax.Array  # int32 [] drafts that were right, from the first on
    confidence: jax.Array  # float32 [N]
    tail: jax.Array  # int32 [1, max_ngram - 1] look-back of the next step
    memory: PagedMemory


class Decoder:
    """Compiled steps for one model; `generate` may be called any number of times."""

    def __init__(
        self,
        params: Any,
        config: ModelConfig,
        *,
        context: int,
        drafts: int,
        chunk: int,
        format: str,
    ) -> None:
        """
        Args:
          context: prompt and answer together, tokens.
          drafts: drafts verified per step; 0 decodes plainly.
          chunk: tokens of a prompt per step.
          format: of the memory, "bytes" or "values".
        """
        self.params, self.config, self.context = params, config, context
        self.drafts, self.chunk = drafts, chunk
        blocks = -(-(context + drafts + 1) // BLOCK_TOKENS)
        cache = CacheConfig(block_tokens=BLOCK_TOKENS, nextn=max(drafts, 1))
        empty = create_paged(
            config, cache, blocks=blocks + 1, slots=2, format=format, dtype=jnp.float32
        )
        table = jnp.arange(1, blocks + 1, dtype=jnp.int32)[None]
        self.empty = bind(empty, jnp.ones(1, jnp.int32), table)
        self._warm = False  # the step is compiled: from then on a new trace is an error
        self._prefill = jax.jit(self._forward)
        self._step = jax.jit(self._speculate if drafts else self._plain)

    def use(self, params: Any) -> None:
        """Decode with other weights of the same model; where they are placed may compile anew."""
        self.params, self._warm = params, False

    def check(self, prompt: np.ndarray, count: int) -> None:
        """Refuse what `generate` could not answer.

        Raises:
          ValueError: an empty prompt, or no room for it and `count` tokens.
        """
        if not len(prompt):
            raise ValueError("the prompt is empty; give at least one token")
        if len(prompt) + count > self.context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {count} are asked for; the context is "
                f"{self.context}, so shorten the prompt or lower max_new_tokens"
            )

    def generate(self, prompt: np.ndarray, count: int, stop: int) -> Iterator[Step]:
        """Steps until `count` tokens were made or `stop` was; the first one has the prompt's token.

        Raises:
          ValueError: see `check`.
        """
        self.check(prompt, count)
        step = self._read(np.asarray(prompt, np.int32))
        yield step
        made, position = 1, len(prompt)
        last = np.asarray(step.tokens)[int(step.accepted)]
        while made < count and last != stop:
            with jax.no_tracing() if self._warm else contextlib.nullcontext():
                step = self._step(self.params, _one(last), _one(position), step.tail, step.memory)
            self._warm = True
            kept = int(step.accepted) + 1
            made, position = made + kept, position + kept
            tokens = np.asarray(step.tokens)[:kept]
            last = stop if stop in tokens else tokens[-1]
            yield step

    def _read(self, prompt: np.ndarray) -> Step:
        """The prompt, chunk by chunk."""
        memory, tail = self.empty, jnp.full((1, self._reach), -1, jnp.int32)
        for start in range(0, len(prompt), self.chunk):
            part = prompt[start : start + self.chunk]
            padded = np.zeros((1, self.chunk), np.int32)
            padded[0, : len(part)] = part
            best, tail, memory = self._prefill(
                self.params, padded, _one(start), _one(len(part)), tail, memory
            )
        token = np.asarray(best)[0, len(part) - 1 : len(part)]
        return Step(token, np.int32(0), np.zeros(0, np.float32), tail, memory)  # type: ignore[arg-type]

    @property
    def _reach(self) -> int:
        return self.config.engram.max_ngram - 1 if self.config.engram else 1

    def _forward(
        self,
        params: Any,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
        tail: jax.Array,
        memory: PagedMemory,
    ) -> tuple[jax.Array, jax.Array, PagedMemory]:
        """Most likely next tokens [1, Q], the look-back behind row count - 1, and the memory."""
        rows = text_rows(self.config, tokens, start, count, lookback=tail)
        made, memory = backbone.forward(params, self.config, rows, memory)
        best = jnp.argmax(backbone.logits(params, self.config, made.hidden), -1).astype(jnp.int32)
        return best, self._tail(tail, tokens, count), memory

    def _tail(self, tail: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
        both = jnp.concatenate([tail, tokens], axis=1)
        return jax.lax.dynamic_slice_in_dim(both, count[0], self._reach, axis=1)

    def _plain(
        self, params: Any, token: jax.Array, at: jax.Array, tail: jax.Array, memory: PagedMemory
    ) -> Step:
        best, tail, memory = self._forward(params, token[None], at, jnp.ones_like(at), tail, memory)
        return Step(best[0], jnp.int32(0), jnp.zeros(0), tail, memory)

    def _speculate(
        self, params: Any, token: jax.Array, at: jax.Array, tail: jax.Array, memory: PagedMemory
    ) -> Step:
        """Drafts, and the longest run of them that the backbone would have chosen itself."""
        made = draft.propose(params, self.config, token, at, memory, self.drafts)
        tokens = jnp.concatenate([token[None], made.tokens], axis=1)
        count = jnp.full_like(at, self.drafts + 1)
        best, _, memory = self._forward(params, tokens, at, count, tail, memory)
        right = made.tokens[0] == best[0, :-1]
        accepted = jnp.cumprod(right.astype(jnp.int32)).sum()
        tail = self._tail(tail, tokens, accepted[None] + 1)
        return Step(best[0], accepted, made.confidence[0], tail, memory)


def _one(value: Any) -> np.ndarray:
    return np.array([value], np.int32)
