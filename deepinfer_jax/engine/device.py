"""The device as a loop sees it: queue a plan's forward pass, queue its sampling, wait for it.

Nothing here waits but `Pending.wait`. Every program is compiled at its first use, one per bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from deepinfer_jax.cache.paged import PagedMemory
from deepinfer_jax.cache.snapshots import Image
from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.engine import pack, penalties
from deepinfer_jax.engine.answer import Answer, answer_of
from deepinfer_jax.engine.device_state import create_state, reach
from deepinfer_jax.engine.grammar import EVERYTHING
from deepinfer_jax.engine.images import Images
from deepinfer_jax.engine.logprobs import Logprobs
from deepinfer_jax.engine.picture_rows import PictureRows
from deepinfer_jax.engine.plan import PlanRow, RowOutcome, StepOutcome, StepPlan
from deepinfer_jax.engine.programs import Programs, illustrated, program, rehearsals
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.engine.sampling import PackedSampling
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams
from deepinfer_jax.engine.step import Step, StepOutput
from deepinfer_jax.model.numerics import RELEASED, Numerics
from pallas_kernels.choice import check_platform


@dataclasses.dataclass(frozen=True)
class Pending:
    """A sampled step that was not waited for."""

    plan: StepPlan
    output: StepOutput | None  # None: nobody sampled
    prompts: tuple[tuple[Sequence[PlanRow], Logprobs], ...]  # chunks side by side, and a report
    queued: float  # when its forward pass was queued

    def wait(self, requests: Sequence[Request]) -> tuple[StepOutcome, float]:
        """Block until the step is over: what it found, row by row, and the sum over verified drafts
        of |chance of acceptance - confidence|.
        """
        output, reports = jax.device_get((self.output, [r for _, r in self.prompts]))
        note_prompts(self.plan, [rows for rows, _ in self.prompts], reports, requests)
        return outcome_of(self.plan, output, requests)


class Device(Programs):
    """Weights, one state tree, and the programs that advance it."""

    def __init__(
        self,
        params: dict[str, Any],
        model: ModelConfig,
        config: EngineConfig,
        *,
        buckets: pack.Buckets | None = None,
        limits: SamplingLimits | None = None,
        format: str = "values",
        numerics: Numerics = RELEASED,
        token_map: Any = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Memory of the configured size, in the dtype of `params`.

        Args:
          compiler_options: XLA's, as of `jax.jit`.

        Raises:
          ValueError: kernels that do not run here, buckets too small for the configuration, or see `create_state`.
        """
        check_platform(config.kernels, jax.default_backend())
        self.model, self.config = model, config
        self.limits = limits or SamplingLimits()
        self.buckets = buckets or pack.Buckets.of(config)
        self.buckets.check(config)
        self.widths = self.buckets.widths or (config.step_rows,)
        place = SingleDeviceSharding(jax.devices()[0])
        self.params = jax.device_put(params, place)
        state = create_state(
            model,
            config,
            rows=self.buckets.rows,
            format=format,
            dtype=params["embed"].dtype,
        )
        self.state = jax.device_put(state, place)
        step = Step(model, config, self.limits.logprobs, numerics, token_map)
        made = functools.partial(program, compiler_options=compiler_options)
        programs = {
            "prompt": made(step.read_prompt, donate=1),
            "decode": made(step.read_decode, donate=1),
            "sample": made(step.sample, donate=1),
            "draft": made(step.draft, donate=1),
            "report": made(step.report_prompt),
            "remember": made(step.remember, donate=0),
        }
        super().__init__(programs, place)
        self.images = Images()
        self._packed: tuple[Any, PackedSampling] | None = None  # of the newest batch
        self._prompts: list[tuple[Sequence[PlanRow], Logprobs]] = []
        self._queued = 0.0

    # What a loop calls

    def forward(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Queue the backbone over the plan's rows."""
        self._queued, self._prompts = time.perf_counter(), []
        if plan.is_prompt:
            self._keep_memory(self.images.restore(self.state.memory, plan.rows))
            for at in range(0, len(plan.rows), self.buckets.prompts):
                group = slice(at, at + self.buckets.prompts)
                self._read_prompts(plan.rows[group], requests[group], at)
        elif plan.rows:
            self._draft_first(plan, requests)
            width, drafts = plan.rows[0].q, plan.drafts
            batch = pack.pack_decode(plan.rows, self.buckets, reach(self.model), width, drafts)
            self.state = self.run("decode", self.params, self.state, batch)

    def sample(self, plan: StepPlan, requests: Sequence[Request]) -> Pending:
        """Queue verification, draws and drafts; all steps before must be committed."""
        output = None
        if any(row.last_chunk for row in plan.rows):
            batch = self._sample_batch(plan, requests)
            self.state, output = self.run("sample", self.params, self.state, batch)
        return Pending(plan, output, tuple(self._prompts), self._queued)

    def snapshot(self, slot: int, position: int) -> Image:
        """A stored image of the newest memory, for a `PrefixCache`; queued, not waited for."""
        return self.images.take(self.state.memory, slot, position)

    def warm_up(self, masks: bool = False, images: bool = False, pictures: bool = False) -> None:
        """Compile every bucket, for a grammar's masks, a prefix cache's images, pictures if asked.

        Writes to nobody's memory only.
        """
        if images:
            hit = Hit(0, 0, image=self.snapshot(0, 0))
            row = PlanRow(-1, 1, 1, (0,), (), (0,), 0, first=True, hit=hit)
            self._keep_memory(self.images.restore(self.state.memory, (row,)))
        for plan in rehearsals(self.config, self.buckets, self.widths):
            self._rehearse(plan, masks)
            if pictures and plan.is_prompt:
                self.forward(*illustrated(plan, self.model.hidden_size))

    def _rehearse(self, plan: StepPlan, masks: bool) -> None:
        greedy = Answer(SamplingParams(temperature=0.0), seed=0)
        requests = [Request(-1, [0], sampling=greedy) for _ in plan.rows]
        self.forward(plan, requests)
        pending = [self.sample(plan, requests)]
        if masks and pending[0].output is not None:
            batch = self._sample_batch(plan, requests)
            shape = (*batch.forced.shape, -(-self.model.vocab_size // 32))
            batch = dataclasses.replace(batch, mask=np.full(shape, EVERYTHING, np.int32))
            self.state, output = self.run("sample", self.params, self.state, batch)
            pending.append(Pending(plan, output, (), 0.0))
        for p in pending:
            p.wait(requests)

    def resume(self, requests: Sequence[Request]) -> None:
        """Queue what else a slot must know whose state was handed over."""
        for request in requests:
            if answer_of(request).params.penalised:
                self.remember(request)

    # Parts

    def _keep_memory(self, memory: PagedMemory) -> None:
        self.state = dataclasses.replace(self.state, memory=memory)

    def _read_prompts(self, rows: Sequence[PlanRow], requests: Sequence[Request], at: int) -> None:
        for row, request in zip(rows, requests, strict=True):
            if row.first and answer_of(request).params.penalised:
                self.remember(request)
        batch = pack.pack_prompt(rows, at, self.model, self.config, self.buckets, reach(self.model))
        width = self.model.hidden_size
        shown = PictureRows.of(rows, requests, batch.tokens.shape, width)
        batch = dataclasses.replace(batch, pictures=shown)
        self.state, hidden = self.run("prompt", self.params, self.state, batch)
        if any(answer_of(r).params.prompt_logprobs is not None for r in requests):
            following = np.full(batch.tokens.shape, self.model.vocab_size, np.int32)
            for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
                ids = request.prompt[row.start + 1 : row.k + 1]
                following[i, : len(ids)] = ids
            report = self.run("report", self.params, hidden, following)
            self._prompts.append((rows, report))

    def _draft_first(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        fresh = [(r, q) for r, q in zip(plan.rows, requests, strict=True) if r.draft_first]
        if not fresh:
            return
        rows, asking = zip(*fresh, strict=True)
        count = pack.bucket(self.buckets.sequences, len(rows))
        packed = pack.pack_params(asking, count, self.model, self.limits)
        batch = pack.pack_drafts(rows, packed)
        self.state = self.run("draft", self.params, self.state, batch)

    def remember(self, request: Request) -> None:
        """Queue that a request's slot knows its tokens, for penalties."""
        vocabulary = self.model.vocab_size
        counts = penalties.history_of(request.tokens, request.prompt_length, vocabulary)
        self.state = self.run("remember", self.state, (np.int32(request.slot), counts))

    def _sample_batch(self, plan: StepPlan, requests: Sequence[Request]) -> pack.SampleBatch:
        count = pack.bucket(self.buckets.sequences, len(plan.rows))
        width = self.config.step_rows if plan.is_prompt else plan.rows[0].q
        masks = pack.pack_masks(plan.rows, requests, count, width - 1, self.model.vocab_size)
        packed = self._packed_params(requests, count)
        return pack.pack_sample(plan.rows, requests, packed, width, masks)

    def _packed_params(self, requests: Sequence[Request], count: int) -> PackedSampling:
        """The same arrays while the batch is the same."""
        key = (tuple(r.request_id for r in requests), count)
        if self._packed is None or self._packed[0] != key:
            self._packed = key, pack.pack_params(requests, count, self.model, self.limits)
        return self._packed[1]


def note_prompts(
    plan: StepPlan,
    chunks: Sequence[Sequence[PlanRow]],
    reports: Sequence[Logprobs],
    requests: Sequence[Request],
) -> None:
    """What fetched reports say of the prompts of a plan, group of chunks by group."""
    for rows, report in zip(chunks, reports, strict=True):
        for i, row in enumerate(rows):
            _note_prompt(requests[plan.index[row.request_id]], row, report, i)


def outcome_of(
    plan: StepPlan, output: StepOutput | None, requests: Sequence[Request]
) -> tuple[StepOutcome, float]:
    """See `Pending.wait`; `output` was fetched, None where nobody sampled."""
    if output is None:
        return StepOutcome(tuple(RowOutcome() for _ in plan.rows)), 0.0
    found = tuple(_outcome(output, i, r) for i, r in enumerate(requests))
    return StepOutcome(found), float(output.confidence_error[: len(found)].sum())


def _note_prompt(request: Request, row: PlanRow, report: Logprobs, i: int) -> None:
    """Append what row i of a report says of the prompt's tokens, unless it is known."""
    answer = answer_of(request)
    if answer.params.prompt_logprobs is None:
        return
    for j in range(row.q):
        known = len(answer.prompt_report)
        if known == row.start + j and known < request.prompt_length - 1:
            answer.prompt_report.append(jax.tree.map(lambda x, j=j: x[i, j], report))


def _outcome(output: StepOutput, i: int, request: Request) -> RowOutcome:
    """Row i of a fetched output."""
    count = int(output.count[i])
    if count == 0:
        return RowOutcome()
    details = None
    if answer_of(request).params.logprobs is not None:
        details = jax.tree.map(lambda x: x[i, :count], output.report)
    return RowOutcome(
        tokens=tuple(output.tokens[i, :count].tolist()),
        drafts=tuple(output.drafts[i].tolist()),
        confidences=tuple(output.confidence[i].tolist()),
        q=int(output.rows[i]),
        details=details,
    )
