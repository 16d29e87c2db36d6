"""The devices of all ranks of a group as one: one program steps them together.

Every array of the state and of a batch has an entry per rank; under `jax.shard_map` a rank sees its
own, and `Step` runs as on one device but for the exchange of experts' rows. A rank without work runs
an idle step of the others' shape. Engine rank r is device r of the mesh, group by group.

The devices may be those of several processes. Each process then plans for all ranks, and all plan
the same, for a plan depends on nothing but the requests and what was sampled; so what is sampled
goes to every process, and each must be given the same requests in the same order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.engine import pack
from deepinfer_jax.engine.answer import Answer, answer_of
from deepinfer_jax.engine.device import outcome_of
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.flat import flatten
from deepinfer_jax.engine.grammar import EVERYTHING
from deepinfer_jax.engine.mesh_programs import empty_state, step_programs
from deepinfer_jax.engine.penalties import history_of
from deepinfer_jax.engine.picture_rows import PictureRows
from deepinfer_jax.engine.plan import StepOutcome, StepPlan
from deepinfer_jax.engine.programs import Programs, illustrated, rehearsals
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams
from deepinfer_jax.engine.step import StepOutput
from deepinfer_jax.model.numerics import RELEASED, Numerics
from deepinfer_jax.model.placing import on_mesh, partition_specs
from deepinfer_jax.parallel.mesh import RANKS, ranks
from deepinfer_jax.rules import require

Plans = Sequence[StepPlan]
Requests = Sequence[Sequence[Request]]


@dataclasses.dataclass
class Sampled:
    """A sampled step of all ranks; fetched once, by the rank that waits first."""

    output: StepOutput | None
    fetched: StepOutput | None = None

    def of(self, rank: int) -> StepOutput | None:
        """A rank's part, waited for."""
        if self.output is not None and self.fetched is None:
            self.fetched = jax.device_get(self.output)
        return jax.tree.map(lambda x: x[rank], self.fetched)


@dataclasses.dataclass(frozen=True)
class RankPending:
    """One rank's part of a sampled step; what a loop knows as `device.Pending`."""

    plan: StepPlan
    sampled: Sampled
    rank: int
    queued: float

    def wait(self, requests: Sequence[Request]) -> tuple[StepOutcome, float]:
        """See `device.Pending.wait`."""
        return outcome_of(self.plan, self.sampled.of(self.rank), requests)


class MeshDevice(Programs):
    """Weights, the state trees of all ranks, and the programs that advance them."""

    def __init__(
        self,
        params: dict[str, Any],
        model: ModelConfig,
        config: EngineConfig,
        mesh: Mesh,
        *,
        buckets: pack.Buckets | None = None,
        limits: SamplingLimits | None = None,
        format: str = "values",
        numerics: Numerics = RELEASED,
        token_map: Any = None,
        extra_experts: int = 0,
        window: int = 0,
        capacity: int = 0,
        ragged: bool = False,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Memory of the configured size on each rank, in the dtype of `params`.

        Args:
          mesh: of `parallel.mesh.make_mesh`.
          extra_experts: copies of experts, at least, in each layer.
          window: decode steps whose routing is counted, for `Balancer`.
          capacity, ragged: see `parallel.mesh.Parallel`.
          compiler_options: XLA's, as of `jax.jit`.

        Raises:
          ValueError: buckets too small for the configuration, or see `create_state`.
        """
        require(
            config.kernels == "xla",
            f"kernels is {config.kernels!r}, which no mesh has run; choose xla",
        )
        self.model, self.config, self.mesh = model, config, mesh
        self.limits, self.ranks = limits or SamplingLimits(), ranks(mesh)
        self.buckets = buckets or pack.Buckets.of(config)
        self.buckets.check(config)
        self.widths = self.buckets.widths or (config.step_rows,)
        self.params = on_mesh(params, model, mesh, extra_experts)
        place = NamedSharding(mesh, RANKS)
        programs = step_programs(
            model,
            config,
            mesh,
            partition_specs(self.params, model),
            alternatives=self.limits.logprobs,
            numerics=numerics,
            token_map=token_map,
            capacity=capacity,
            ragged=ragged,
            compiler_options=compiler_options,
        )
        super().__init__(programs, place)
        empty = empty_state(
            model,
            config,
            mesh,
            rows=self.buckets.rows,
            format=format,
            dtype=params["embed"].dtype,
            window=window,
        )
        self.state = jax.jit(empty, out_shardings=place)()
        self._queued = 0.0

    # What a loop calls

    def forward(self, plans: Plans, requests: Requests) -> None:
        """Queue the backbone over the rows of every rank's plan; all plans are of one kind."""
        self._queued = time.perf_counter()
        if not any(plan.rows for plan in plans):
            return
        sizes, back = self.buckets.narrowed(plans), reach(self.model)
        if plans[0].is_prompt:
            for at in range(0, max(len(plan.rows) for plan in plans), sizes.prompts):
                self._remember(plans, requests, slice(at, at + sizes.prompts))
                parts = [plan.rows[at : at + sizes.prompts] for plan in plans]
                batches = [
                    pack.pack_prompt(p, at, self.model, self.config, sizes, back) for p in parts
                ]
                asking = [rank[at : at + sizes.prompts] for rank in requests]
                shape, hidden = batches[0].tokens.shape, self.model.hidden_size
                shown = PictureRows.of_ranks(parts, asking, shape, hidden)
                self._advance("prompt", list(map(_with_pictures, batches, shown)))
            return
        width = max(row.q for plan in plans for row in plan.rows)
        drafts = [0 if p.drafts is None and not p.rows else p.drafts for p in plans]
        if all(p.drafts is None for p in plans):
            drafts = [None] * len(plans)
        self._advance(
            "decode",
            [
                pack.pack_decode(p.rows, sizes, back, width, d)
                for p, d in zip(plans, drafts, strict=True)
            ],
        )

    def sample(self, plans: Plans, requests: Requests) -> list[RankPending]:
        """Queue verification, draws and drafts; all steps before must be committed."""
        sampled = Sampled(None)
        if any(row.last_chunk for plan in plans for row in plan.rows):
            batches = [
                self._sample_batch(plans, plan, asking)
                for plan, asking in zip(plans, requests, strict=True)
            ]
            self.state, output = self._run("sample", _with_masks(batches))
            sampled = Sampled(output)
        return [RankPending(plan, sampled, r, self._queued) for r, plan in enumerate(plans)]

    def warm_up(self, masks: bool = False, pictures: bool = False) -> None:
        """Compile every bucket, with grammar masks and pictures too if asked.

        Writes to nobody's memory only.
        """
        greedy = Answer(SamplingParams(temperature=0.0), seed=0)
        for plan in rehearsals(self.config, self.buckets, self.widths):
            plans = [plan] * self.ranks
            requests = [[Request(-1, [0], sampling=greedy) for _ in plan.rows]] * self.ranks
            self.forward(plans, requests)
            for pending in self.sample(plans, requests):
                pending.sampled.of(pending.rank)
            if pictures and plan.is_prompt:
                shown, asking = illustrated(plan, self.model.hidden_size)
                self.forward([shown] * self.ranks, [asking] * self.ranks)

    # Parts

    def _advance(self, name: str, batches: list[Any]) -> None:
        self.state = self._run(name, batches)

    def _run(self, name: str, batches: list[Any]) -> Any:
        """Queue a program for a batch of each rank, all of one shape."""
        flats, layouts = zip(*map(flatten, batches), strict=True)
        return self.queue(name, layouts[0], self.params, self.state, np.stack(flats))

    def _sample_batch(
        self, plans: Plans, plan: StepPlan, requests: Sequence[Request]
    ) -> pack.SampleBatch:
        count = pack.bucket(self.buckets.sequences, max(len(p.rows) for p in plans))
        rows = [row for p in plans for row in p.rows]
        width = self.config.step_rows if plan.is_prompt else max(row.q for row in rows)
        masks = pack.pack_masks(plan.rows, requests, count, width - 1, self.model.vocab_size)
        packed = pack.pack_params(requests, count, self.model, self.limits)
        return pack.pack_sample(plan.rows, requests, packed, width, masks)

    def _remember(self, plans: Plans, requests: Requests, part: slice) -> None:
        """Slots of new tenants with penalties learn their tokens, one of each rank at a time."""
        fresh = [
            [
                request
                for row, request in zip(plan.rows[part], asking[part], strict=True)
                if row.first and answer_of(request).params.penalised
            ]
            for plan, asking in zip(plans, requests, strict=True)
        ]
        nobody = np.int32(self.config.num_slots), np.zeros(self.model.vocab_size, np.int32)
        for i in range(max(len(queue) for queue in fresh)):
            tenants = [
                _tenant(queue[i], self.model.vocab_size) if i < len(queue) else nobody
                for queue in fresh
            ]
            self._advance("remember", tenants)


def _tenant(request: Request, vocabulary: int) -> tuple[np.int32, np.ndarray]:
    """The batch of `Step.remember`."""
    counts = history_of(request.tokens, request.prompt_length, vocabulary)
    return np.int32(request.slot), counts


def _with_pictures(batch: pack.PromptBatch, shown: PictureRows | None) -> pack.PromptBatch:
    return dataclasses.replace(batch, pictures=shown)


def _with_masks(batches: list[pack.SampleBatch]) -> list[pack.SampleBatch]:
    """If one rank has grammar masks, all have: those of the others allow everything."""
    given = [b.mask for b in batches if b.mask is not None]
    if not given:
        return batches
    free = np.full_like(given[0], EVERYTHING)
    return [b if b.mask is not None else dataclasses.replace(b, mask=free) for b in batches]
