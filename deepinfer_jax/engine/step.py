"""What the device does in one step, as pure functions of the whole state: read, then sample.

A step is `read_prompt` or `read_decode` (the backbone over the step's rows) and `sample` (verify,
draw, draft). They are two programs so that the host can hand over grammar masks in between, and so
that one sampling program serves both kinds of step. S sequences, N drafts, V ids, D hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.paged import PagedMemory, bind
from deepinfer_jax.config import EngineConfig, ModelConfig, Role
from deepinfer_jax.engine import logprobs, penalties
from deepinfer_jax.engine.correction import device_k
from deepinfer_jax.engine.device_state import (
    DeviceState,
    Flight,
    Proposed,
    count_visits,
    write_rows,
)
from deepinfer_jax.engine.draft_lengths import cumulative, split
from deepinfer_jax.engine.pack import DecodeBatch, DraftBatch, PromptBatch, SampleBatch
from deepinfer_jax.engine.sampling import RowContext, process
from deepinfer_jax.engine.sampling_drafts import DraftSampler
from deepinfer_jax.engine.verify import Proposals, noise, verify
from deepinfer_jax.model import backbone, draft
from deepinfer_jax.model.numerics import RELEASED, Numerics
from deepinfer_jax.model.rows import take, text_rows
from deepinfer_jax.parallel.mesh import ALONE, Parallel

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the host fetches."""

    tokens: jax.Array  # int32 [S, N + 1] emitted, V behind them
    count: jax.Array  # int32 [S] emitted; 0: idle
    rows: jax.Array  # int32 [S] query rows
    drafts: jax.Array  # int32 [S, N] new proposals
    confidence: jax.Array  # float32 [S, N] of the new proposals
    confidence_error: jax.Array  # float32 [S] sum |chance of acceptance - confidence|, verified
    report: logprobs.Logprobs  # of the emitted tokens; zeros unless asked for


@dataclasses.dataclass(frozen=True)
class Step:
    """What stays fixed while steps are traced; its methods are the device's programs."""

    model: ModelConfig
    config: EngineConfig
    alternatives: int = 20  # log-probabilities reported per token
    numerics: Numerics = RELEASED
    token_map: Any = None  # int32 [V], see `model.rows.text_rows`
    parallel: Parallel = ALONE  # the ranks that step together; its context divides prompts only

    def read_prompt(
        self, params: Params, state: DeviceState, batch: PromptBatch
    ) -> tuple[DeviceState, jax.Array]:
        """Chunks of prompts into the memory; also every row's hidden [S, Q or keep, D]."""
        given, cache = batch.rows, self.config.cache
        rows = text_rows(
            self.model,
            batch.tokens,
            given.start,
            given.count,
            lookback=given.lookback if self.model.engram else None,
            token_map=self.token_map,
            kept_start=batch.kept_start,
            window_start=batch.window_start,
            global_start=batch.global_start,
        )
        if batch.pictures is not None:
            shown = batch.pictures
            rows = dataclasses.replace(rows, is_image=shown.is_image, embeddings=shown.embeddings)
        made, memory = backbone.forward(
            params,
            self.model,
            rows,
            bind(state.memory, given.slots, given.tables),
            truncation=cache.truncation,
            keep=cache.keep,
            numerics=self.numerics,
            parallel=self.parallel,
            kernels=self.config.kernels,
        )
        end = jnp.maximum(made.rows.count - 1, 0)
        last = take(batch.tokens, jnp.maximum(given.count - 1, 0), 1)
        flight = write_rows(
            state.flight,
            batch.at,
            start=given.start + given.count - 1,
            count=batch.last,
            tokens=self._padded(last),
            hidden=_padded_rows(take(made.hidden, end, 1), cache.nextn),
        )
        return _rested(state, memory, flight), made.hidden

    def read_decode(self, params: Params, state: DeviceState, batch: DecodeBatch) -> DeviceState:
        """One verify step: the newest token of each sequence and its drafts."""
        given = batch.rows
        start, first, tail = self._corrected(state.flight, batch)
        count = self._split(state.proposed, batch)
        drafts = state.proposed.tokens[batch.read_slots, : batch.width - 1]
        drafts = jnp.where(batch.read_slots[:, None] > 0, drafts, self.model.vocab_size)
        tokens = jnp.concatenate([first[:, None], drafts], axis=1)
        rows = text_rows(
            self.model,
            tokens,
            start,
            count,
            lookback=tail if self.model.engram else None,
            token_map=self.token_map,
        )
        memory = bind(state.memory, given.slots, given.tables)
        made, memory = backbone.forward(
            params,
            self.model,
            rows,
            memory,
            numerics=self.numerics,
            parallel=self._repeated,
            kernels=self.config.kernels,
        )
        flight = write_rows(
            state.flight,
            0,
            start=start,
            count=count,
            tokens=self._padded(tokens),
            tail=tail,
            hidden=_padded_rows(made.hidden, self.config.step_rows - batch.width),
        )
        return count_visits(_rested(state, memory, flight), made.visits)

    def sample(
        self, params: Params, state: DeviceState, batch: SampleBatch
    ) -> tuple[DeviceState, StepOutput]:
        """Verify the drafts of the newest step, draw one token more, and propose new drafts."""
        rows, width = batch.forced.shape
        flight: Flight = jax.tree.map(lambda x: x[:rows], state.flight)
        flight = dataclasses.replace(
            flight, tokens=flight.tokens[:, :width], hidden=flight.hidden[:, :width]
        )
        count = jnp.where(batch.live, flight.count, 0)
        logits = backbone.logits(params, self.model, flight.hidden)
        drafts = flight.tokens[:, 1:]
        positions = flight.start[:, None] + 1 + jnp.arange(flight.tokens.shape[1])
        context = RowContext(positions, drafts, batch.slots, state.history, batch.mask)
        log_q = process(logits, batch.packed, context)
        known = state.proposed.log_probs[batch.read_slots, : width - 1]
        old = Proposals(drafts, known, batch.read_slots == 0)
        chance = noise(batch.packed.seed, positions)
        verdict = verify(old, log_q, count, chance, batch.forced)
        proposed, drafted = state.proposed, _no_drafts(verdict.tokens)
        if self.config.cache.nextn and self.config.role != Role.PROMPT:
            position = flight.start + verdict.accepted + 1
            drafting = DraftBatch(
                verdict.final, position, batch.slots, batch.draft_slots, batch.packed
            )
            proposed, drafted = self._propose(params, state, drafting)
        new = dataclasses.replace(
            state,
            proposed=proposed,
            flight=write_rows(state.flight, 0, accepted=verdict.accepted, final=verdict.final),
            history=penalties.see_output(state.history, batch.slots, verdict.tokens),
        )
        verified = (jnp.arange(drafts.shape[1]) < count[:, None] - 1) & ~old.is_point[:, None]
        confidence = state.proposed.confidence[batch.read_slots, : width - 1]
        error = jnp.where(verified, jnp.abs(verdict.accept_prob - confidence), 0).sum(1)
        report = self._report(logits, log_q, verdict.tokens, batch)
        return new, StepOutput(verdict.tokens, verdict.count, count, *drafted, error, report)

    def draft(self, params: Params, state: DeviceState, batch: DraftBatch) -> DeviceState:
        """Proposals of sequences whose state was handed over, as the prompt's step would make."""
        proposed, _ = self._propose(params, state, batch)
        return dataclasses.replace(state, proposed=proposed)

    def report_prompt(
        self, params: Params, hidden: jax.Array, tokens: jax.Array
    ) -> logprobs.Logprobs:
        """The model's log-probabilities of tokens int32 [S, Q] behind each row [S, Q, D]."""
        logits = backbone.logits(params, self.model, hidden)
        return logprobs.report(logprobs.model_log_probs(logits), tokens, self.alternatives)

    def remember(self, state: DeviceState, tenant: tuple[jax.Array, jax.Array]) -> DeviceState:
        """A slot's new tenant has penalties: (slot int32 [], its history int32 [V] so far)."""
        slot, counts = tenant
        return dataclasses.replace(state, history=state.history.at[slot].set(counts))

    @property
    def _repeated(self) -> Parallel:
        """For steps of few rows, which every rank of a context makes."""
        return dataclasses.replace(self.parallel, context=())

    def _split(self, proposed: Proposed, batch: DecodeBatch) -> jax.Array:
        """Query rows int32 [S] of each sequence."""
        count = batch.rows.count
        if batch.drafts is None:
            return count
        rates = cumulative(proposed.confidence[batch.read_slots, : batch.width - 1])
        rates = jnp.where(batch.read_slots[:, None] > 0, rates, 0.0)
        return split(rates, batch.drafts, count > 0)

    def _corrected(
        self, flight: Flight, batch: DecodeBatch
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Position and id of row 0 and the ids before it, by the flight before where remapped."""
        size = flight.start.shape[0]
        known, given = batch.remap < size, batch.rows
        before: Flight = jax.tree.map(lambda x: x[jnp.minimum(batch.remap, size - 1)], flight)
        k = device_k(given.start, given.count, self.config.cache.nextn, before.accepted)
        start = jnp.where(known, k - given.count, given.start)
        first = jnp.where(known, before.final, batch.tokens)
        both = jnp.concatenate([before.tail, before.tokens], axis=1)
        tail = take(both, before.accepted + 1, before.tail.shape[1])
        return start, first, jnp.where(known[:, None], tail, given.lookback)

    def _propose(
        self,
        params: Params,
        state: DeviceState,
        batch: DraftBatch,
    ) -> tuple[Proposed, tuple[jax.Array, jax.Array]]:
        """New proposals, kept on the device; tokens and confidences also for the host."""
        sampler = DraftSampler(batch.packed, batch.position + 1)
        tables = jnp.zeros((batch.slots.shape[0], 1), jnp.int32)
        made = draft.propose(
            params,
            self.model,
            batch.tokens,
            batch.position,
            bind(state.memory, batch.slots, tables),
            self.config.cache.nextn,
            choose=sampler,
            numerics=self.numerics,
            parallel=self._repeated,
            kernels=self.config.kernels,
        )
        new, at, old = sampler.proposals(made.tokens), batch.draft_slots, state.proposed
        proposed = Proposed(
            old.tokens.at[at].set(new.tokens),
            old.log_probs.at[at].set(new.log_probs),
            old.confidence.at[at].set(made.confidence),
        )
        return proposed, (new.tokens, made.confidence)

    def _report(
        self, logits: jax.Array, log_q: jax.Array, tokens: jax.Array, batch: SampleBatch
    ) -> logprobs.Logprobs:
        """Of the emitted tokens, if anybody wants it."""

        def asked() -> logprobs.Logprobs:
            model = logprobs.model_log_probs(logits)
            chosen = logprobs.choose(model, log_q, batch.processed)
            return logprobs.report(chosen, tokens, self.alternatives)

        shapes = jax.eval_shape(asked)
        return jax.lax.cond(
            batch.report,
            asked,
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        )

    def _padded(self, tokens: jax.Array) -> jax.Array:
        """[S, rows] to [S, N + 1], no ids behind them."""
        width = ((0, 0), (0, self.config.step_rows - tokens.shape[1]))
        return jnp.pad(tokens, width, constant_values=self.model.vocab_size)


def _no_drafts(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens[:, :0], tokens[:, :0].astype(jnp.float32)


def _padded_rows(hidden: jax.Array, more: int) -> jax.Array:
    return jnp.pad(hidden, ((0, 0), (0, more), (0, 0)))


def _rested(state: DeviceState, memory: PagedMemory, flight: Flight) -> DeviceState:
    """The state behind a step; its memory bound to nothing, whatever the step's shape was."""
    memory = bind(memory, jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    return dataclasses.replace(state, memory=memory, flight=flight)
