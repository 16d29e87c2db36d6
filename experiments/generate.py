"""Continues a prompt with the tiny trained model, through the engine: greedily, or by sampling.

  python -m experiments.generate --config=configs/tiny.py --prompt="def "
  python -m experiments.generate --config=configs/tiny.py --prompt="def " --config.speculate=true
  python -m experiments.generate --config=configs/tiny.py --prompt="x = " --config.regex="[0-9]+"

With `speculate`, the drafter proposes a block per step and what the model confirms is kept: the
same text, or the same distribution of texts, in fewer steps. A workdir gets summary.json.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

from absl import flags, logging

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.sampling_params import Grammar, SamplingParams
from deepinfer_jax.engine.statistics import StepRecord, summarise
from deepinfer_jax.layout import blocks_needed
from deepinfer_jax.report import records
from experiments import harness
from experiments.training import store

PROMPT = flags.DEFINE_string("prompt", "def ", "The text to continue.")


def main(run: harness.Run) -> None:
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    settings = run.parameters
    if not PROMPT.value:
        raise ValueError("--prompt is empty; give the text to continue")
    wish = wishes(settings, run.seed)
    model = getattr(presets, settings["model"])()
    params, tokenizer = store.load(pathlib.Path(settings["checkpoint"]), model)
    steps: list[StepRecord] = []
    llm = LLM(params, model, tokenizer=tokenizer, record=steps.append, **engine_of(settings, model))
    running = llm.generate(PROMPT.value, wish, stream=True)  # refuses before anything compiles
    print("compiling, up to a minute or two", file=sys.stderr)
    llm.warm_up(grammars=bool(settings["regex"]))
    texts, tokens, began = [""] * wish.n, 0, time.perf_counter()
    print(PROMPT.value, end="", flush=True)
    for news in running:
        if news.error:
            raise ValueError(f"--config.regex: {news.error}")
        texts[news.answer] += news.text
        tokens += len(news.tokens)
        if wish.n == 1:
            print(news.text, end="", flush=True)
    seconds = time.perf_counter() - began
    if wish.n > 1:
        print("".join(f"\n--- answer {i}\n{text}" for i, text in enumerate(texts)), end="")
    per_step = summarise(steps).tau  # None if the prompt step made all
    shown = f", {per_step:.2f} tokens per decode step of a request" if per_step else ""
    print(f"\n{tokens / seconds:.1f} tokens/s{shown}")
    if run.workdir:
        found = {"prompt": PROMPT.value, "texts": texts, "tokens": tokens}
        speed = {"seconds": seconds, "tokens_per_step": per_step}
        records.write_json(run.workdir / "summary.json", {**found, **speed})


def wishes(settings: dict[str, Any], seed: int) -> SamplingParams:
    """How the answers are to be drawn."""
    regex = settings["regex"]
    return SamplingParams(
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        n=settings["answers"],
        max_tokens=settings["max_new_tokens"],
        seed=seed,
        grammar=Grammar("regex", regex) if regex else None,
    )


def engine_of(settings: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """An engine for one prompt and its answers, one program of each kind."""
    drafts = model.draft.block_size if settings["speculate"] and model.draft else 0
    cache, seats, longest = CacheConfig(nextn=drafts), settings["answers"], settings["context"]
    config = EngineConfig(
        cache=cache,
        max_model_len=longest,
        max_num_seqs=seats,
        max_num_batched_tokens=seats * longest,
        num_blocks=1 + seats * (1 + blocks_needed(longest + 4 * (drafts + 1), cache)),
    )
    sizes = Buckets(
        sequences=(seats,),
        prompt=(longest,),
        blocks=(blocks_needed(config.runtime_max_len, cache),),
    )
    return {"config": config, "buckets": sizes, "format": settings["format"]}


if __name__ == "__main__":
    harness.run(main, config="configs/tiny.py")
