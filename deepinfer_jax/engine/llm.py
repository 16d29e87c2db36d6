"""Offline generation: prompts in, answers out, through the same scheduler and loops as a service.

llm = LLM(params, model, EngineConfig(), tokenizer)
for result in llm.generate(["def "], SamplingParams(max_tokens=32)):
    print(result.answers[0].text)
"""

from __future__ import annotations

import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer
from tqdm import tqdm

from deepinfer_jax.config import EngineConfig, ModelConfig, Role
from deepinfer_jax.engine import sampling_params
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.grammar import TIMEOUT, Compilation, Compiler
from deepinfer_jax.engine.group import Group, make_group
from deepinfer_jax.engine.loops import Engine
from deepinfer_jax.engine.measure import chooser
from deepinfer_jax.engine.mesh_device import MeshDevice
from deepinfer_jax.engine.pair import Pair
from deepinfer_jax.engine.pictures import MultimodalPrompt, PictureEncoder, Prepared, Text
from deepinfer_jax.engine.plan import RequestOutput
from deepinfer_jax.engine.prefix_cache import PrefixCache
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.engine.writer import News, Result, Writer, results
from deepinfer_jax.rules import require

Prompt = Text | MultimodalPrompt
Progress = bool | Callable[[int], Any]


class LLM:
    """A model in service on a device, or on a mesh of them. Not for several threads at a time."""

    def __init__(
        self,
        params: dict[str, Any],
        model: ModelConfig,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        prompt_config: EngineConfig | None = None,
        prefix_cache: PrefixCache | None = None,
        mesh: Mesh | None = None,
        curves: pathlib.Path | None = None,
        grammar_timeout: float = TIMEOUT,
        record: Callable[[StepRecord], None] | None = None,
        **device: Any,
    ) -> None:
        """Memory is taken here; programs compile at first use, or in `warm_up`.

        Args:
          tokenizer: needed for text prompts, text answers, stop strings and grammars.
          config: of a normal engine, or, beside a prompt engine, of a completion engine.
          prompt_config: of a prompt engine of its own, with memory of its own, whose requests are
            handed over in this process.
          prefix_cache: remembers prefixes of the engine that computes prompts; a fresh one, of the
            same model and cache.
          mesh: of `parallel.mesh.make_mesh`, whose ranks each have an engine of `config` and share
            the experts. Over several processes each makes the same calls with seeds of its own
            choice, the same in all, and gets all answers.
          curves: folder that keeps step times for verification "confidence", see `measure.chooser`.
          grammar_timeout: seconds that a grammar may take to compile.
          record: gets each committed step.
          device: keywords of each `device.Device`: buckets, limits, format, numerics, token_map,
            compiler_options; or of `mesh_device.MeshDevice`: extra_experts, window, capacity,
            ragged too.

        Raises:
          ValueError: a configuration does not fit the model, or roles that cannot generate.
        """
        config = config or EngineConfig()
        wanted = Role.NORMAL if prompt_config is None else Role.COMPLETION
        require(
            config.role == wanted,
            f"role is {config.role!r}; choose 'normal', or 'completion' beside a prompt_config",
        )
        self.model, self.config, self.tokenizer = model, prompt_config or config, tokenizer
        self.prefix_cache, self._shared = prefix_cache, bool(mesh and mesh.is_multi_process)

        def engine(config: EngineConfig, source: PrefixCache | None) -> Engine:
            memory = Device(params, model, config, **device)
            scheduler = Scheduler(
                config,
                model.vocab_size,
                source=source,
                lookback=reach(model),
                lengths=chooser(memory, curves) if config.verification != "fixed" else None,
            )
            made = Engine(scheduler, memory, record)
            if source is not None:
                source.attach(scheduler.roster.storage.blocks, made.device.snapshot)
            return made

        self.engine: Engine | Pair | Group
        if mesh is not None:
            _check_on_mesh(config, prompt_config, prefix_cache)
            ranks = MeshDevice(params, model, config, mesh, **device)
            self.engine = make_group(ranks, reach(model), record)
        elif prompt_config is not None:
            self.engine = Pair(engine(prompt_config, prefix_cache), engine(config, None))
        else:
            self.engine = engine(config, prefix_cache)
        self.limits: SamplingLimits = device.get("limits") or SamplingLimits()
        self._encoder = PictureEncoder(params, model) if model.vision else None
        self._timeout = grammar_timeout
        self._compiler: Compiler | None = None
        self._next = 0

    def warm_up(self, grammars: bool = False, pictures: bool = False) -> None:
        """Compile the steps that generation needs, with grammars and images or without.

        Programs that encode images are compiled as their sizes come.
        """
        self.engine.warm_up(grammars, self.prefix_cache is not None, pictures)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        stream: Literal[False] = ...,
        progress: Progress = ...,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        stream: Literal[True],
        progress: Progress = ...,
    ) -> Iterator[News]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 frozen
        *,
        stream: bool = False,
        progress: Progress = False,
    ) -> list[Result] | Iterator[News]:
        """Answer prompts; results in their order.

        Args:
          prompts: texts, which get the beginning-of-sequence id, or lists of token ids, or texts and
            images (`MultimodalPrompt`, which gets it too unless its first part is ids); or one.
          params: for all prompts, or one for each.
          stream: give news as they come, instead of results. An iterator that is left early aborts
            what it has not finished.
          progress: True shows a bar on stderr; a function is called with the number of answers that
            have just finished.

        Raises:
          ValueError: a prompt or a wish that this engine cannot serve; nothing has started then.
        """
        writers = self._writers(prompts, params)
        running = self._run(writers, progress)
        if stream:
            return running
        for _ in running:
            pass
        return results(writers)

    def _writers(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Writer]:
        """All answers with their requests, checked; none has started."""
        texts = _several(prompts)
        wishes = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        require(
            len(wishes) == len(texts),
            f"{len(wishes)} sampling params for {len(texts)} prompts; give one, or one for each",
        )
        writers = []
        for number, (text, wish) in enumerate(zip(texts, wishes, strict=True)):
            self._check(wish)
            prepared = self._prepared(text)
            require(
                not prepared.images or wish.prompt_logprobs is None,
                "prompt_logprobs are of a text's tokens and this prompt has images; drop them",
            )
            for answer, seed in enumerate(sampling_params.seeds(wish, secrets.randbits(64))):
                writer = Writer(number, answer, wish, self.tokenizer)
                writer.request = self._request(prepared, wish, seed, writer)
                self.engine.check(writer.request)
                writers.append(writer)
        return writers

    def _check(self, wish: SamplingParams) -> None:
        truncation = self.config.cache.truncation
        sampling_params.check(wish, self.model.vocab_size, self.limits, truncation)
        require(
            self.tokenizer is not None or not (wish.stop or wish.grammar),
            "stop strings and grammars are about text; give the LLM a tokenizer, or use stop_ids",
        )
        require(
            not self._shared or (wish.seed is not None and wish.grammar is None),
            "several processes must draw and plan alike; give each wish a seed and no grammar, "
            "which is ready when its compiler is",
        )

    def _prepared(self, prompt: Prompt) -> Prepared:
        bos = [self.model.bos_token_id]
        if not isinstance(prompt, MultimodalPrompt):
            return Prepared([*bos * isinstance(prompt, str), *self._ids(prompt)])
        require(self._encoder is not None, "the model has no vision part; give text only")
        assert self._encoder is not None
        if prompt.parts and isinstance(prompt.parts[0], str | np.ndarray):
            prompt = MultimodalPrompt([bos, *prompt.parts])
        return self._encoder.prepare(prompt, self._ids)

    def _ids(self, text: Text) -> list[int]:
        if not isinstance(text, str):
            return [int(token) for token in text]
        require(
            self.tokenizer is not None,
            "the prompt is text and there is no tokenizer; give the LLM one, or give token ids",
        )
        assert self.tokenizer is not None
        return self.tokenizer.encode(text).ids

    def _request(
        self, prompt: Prepared, wish: SamplingParams, seed: int, writer: Writer
    ) -> Request:
        self._next += 1
        ids, images = prompt.tokens, prompt.images
        eos = () if wish.ignore_eos else (self.model.eos_token_id,)
        cache, chunks = self.prefix_cache, self.config.chunked_prefill
        return Request(
            self._next,
            ids,
            max_tokens=wish.max_tokens,
            stop_ids=frozenset((*eos, *wish.stop_ids)),
            stop_when=writer.see if self.tokenizer is not None else None,
            images=images,
            pictures=prompt.pictures,
            checkpoints=cache.checkpoints(len(ids), images) if cache and chunks else (),
            schedulable=wish.grammar is None,
            sampling=Answer(wish, seed),
        )

    def _run(self, writers: list[Writer], progress: Progress) -> Iterator[News]:
        """Calls of the loop until all answers are finished; the rest is aborted if left early."""
        require(
            not self.engine.unfinished,
            "another generation of this LLM is under way; finish it or close its iterator first",
        )
        by_id = {w.request.request_id: w for w in writers if w.request is not None}
        bar = tqdm(total=len(writers), unit="answer", disable=progress is not True)
        told = progress if callable(progress) else bar.update
        try:
            for writer in writers:
                assert writer.request is not None
                if writer.params.grammar is not None:
                    writer.compilation = self._compile(writer)
                self.engine.add(writer.request)
            while self.engine.unfinished:
                outputs = self._poll(writers)
                outputs += self.engine.call()
                finished = sum(o.finish_reason is not None for o in outputs)
                if finished:
                    told(finished)
                yield from [by_id[o.request_id].write(o) for o in outputs]
            self.engine.land()
        except GeneratorExit:
            self._drain(by_id)
            raise
        finally:
            bar.close()

    def _drain(self, by_id: dict[int, Writer]) -> None:
        """Abort what is not finished, and run until the engine is empty."""
        for number in by_id:
            self.engine.abort(number)
        while self.engine.unfinished:
            self.engine.call()
        self.engine.land()

    def _compile(self, writer: Writer) -> Compilation:
        """Begin to compile an answer's grammar."""
        assert self.tokenizer is not None and writer.params.grammar is not None
        if self._compiler is None:
            vocabulary, eos = self.model.vocab_size, self.model.eos_token_id
            self._compiler = Compiler(self.tokenizer, vocabulary, eos, timeout=self._timeout)
        return self._compiler.submit(writer.params.grammar)

    def _poll(self, writers: list[Writer]) -> list[RequestOutput]:
        """Let requests go whose grammar is ready, and end those whose grammar is not to be had."""
        waiting = [w for w in writers if w.compilation is not None]
        outputs = []
        for writer in waiting:
            assert writer.compilation is not None and writer.request is not None
            found = writer.compilation.poll()
            if found is None:
                continue
            writer.compilation = None
            if isinstance(found, str):
                writer.error = found
                ended = self.engine.abort(writer.request.request_id, Status.GRAMMAR_FAILED)
                outputs += [ended] if ended else []
            else:
                writer.request.grammar, writer.request.schedulable = found, True
        if waiting and not self.engine.decoding:
            time.sleep(0.001)  # nothing else to do but to wait for the compiler
        return outputs


def _check_on_mesh(
    config: EngineConfig, prompt_config: EngineConfig | None, prefix_cache: PrefixCache | None
) -> None:
    require(
        prompt_config is None and prefix_cache is None and config.verification == "fixed",
        f"verification is {config.verification!r} on a mesh, where prompt engines, prefix caches "
        "and 'confidence' are not to be had; leave them out, or leave the mesh out",
    )


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | MultimodalPrompt):
        return [prompts]
    several = list(prompts)
    if several and isinstance(several[0], int):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]
