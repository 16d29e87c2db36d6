"""Trains a model of about two million parameters on Python sources, then its drafter.

  python -m experiments.train_tiny --config=configs/train_tiny.py --workdir=runs/tiny
  python -m experiments.train_tiny --config=configs/train_tiny.py:smoke --workdir=runs/smoke

The workdir gets the checkpoint (`checkpoint/`), results.jsonl with the losses on the way, and
summary.json: held-out loss beside unigram and bigram counts, acceptance per draft position on the
cached path, calibration of the confidence head, and visits per expert.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import presets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import initialise
from deepinfer_jax.report import records
from deepinfer_jax.report.table import table
from experiments import harness
from experiments.training import baselines, measure, state, store, text
from experiments.training.decoding import Decoder


def train(
    model: ModelConfig, stream: np.ndarray, settings: dict[str, Any], seed: int
) -> tuple[Any, list[dict[str, Any]]]:
    """Weights after both phases, and a record of every `log_every`-th step."""
    random, key = np.random.default_rng(seed), jax.random.key(seed)
    size, length = settings["batch"], settings["context"]
    records_made: list[dict[str, Any]] = []

    def note(phase: str, i: int, of: int, numbers: dict[str, jax.Array], began: float) -> None:
        if i % settings["log_every"] == 0 or i == of:
            plain = {k: v for k, v in jax.device_get(numbers).items() if k != "visits"}
            plain = {k: v.tolist() for k, v in plain.items()}
            seconds = time.perf_counter() - began
            records_made.append({"phase": phase, "step": i, "seconds": seconds, **plain})
            print(f"{phase} {i}/{of} {plain}, {seconds:.0f} s", flush=True)

    part, began = settings["backbone"], time.perf_counter()
    params = initialise(model_parameters(model), key)
    backbone = state.create(params, part["steps"], part["rate"])
    step = state.backbone_step(model, part["balance_speed"])
    for i in range(1, part["steps"] + 1):
        backbone, numbers = step(backbone, jnp.asarray(text.batch(stream, size, length, random)))
        note("backbone", i, part["steps"], numbers, began)
    params, part, began = backbone.params, settings["draft"], time.perf_counter()
    drafter = state.create(jax.tree.map(jnp.copy, params["draft"]), part["steps"], part["rate"])
    step = state.draft_step(model, part["anchors"], part["distilled"])
    for i in range(1, part["steps"] + 1):
        tokens = jnp.asarray(text.batch(stream, size, length, random))
        drafter, numbers = step(drafter, params, tokens, jax.random.fold_in(key, i))
        note("draft", i, part["steps"], numbers, began)
    return {**params, "draft": drafter.params}, records_made


def summarise(
    params: Any,
    model: ModelConfig,
    stream: np.ndarray,
    unseen: np.ndarray,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Everything measured on held-out text."""
    part = settings["held_out"]
    tokens = text.stretches(unseen, part["stretches"], settings["context"])
    decoder = Decoder(
        params,
        model,
        context=settings["context"],
        drafts=model.draft.block_size if model.draft else 0,
        chunk=part["prompt"],
        format="values",
    )
    prompts = tokens[: part["prompts"], : part["prompt"]]
    return {
        "held_out": measure.held_out(params, model, tokens),
        "baselines": baselines.losses(stream, tokens, model.vocab_size),
        "speculation": measure.speculation(decoder, prompts, part["generated"]),
    }


def main(run: harness.Run) -> None:
    settings = run.parameters
    model = getattr(presets, settings["model"])()
    training, unseen = text.sources(settings["characters"])
    tokenizer = text.train_tokenizer(training[::4], model.vocab_size)
    stream, unseen = (text.encode(tokenizer, texts) for texts in (training, unseen))
    params, rows = train(model, stream, settings, run.seed)
    if run.workdir:
        store.save(run.workdir / "checkpoint", params, tokenizer, model)
        records.write_jsonl(run.workdir / "results.jsonl", rows, len(rows))
        params, _ = store.load(run.workdir / "checkpoint", model)  # measured as it is served
    summary = summarise(params, model, stream, unseen, settings)
    if run.workdir:
        records.write_json(run.workdir / "summary.json", summary)
    losses = {"model": summary["held_out"]["nats"], **summary["baselines"]}
    print(table([{"held-out nats per token": k, "": f"{v:.3f}"} for k, v in losses.items()]))
    print(f"tokens per speculative step: {summary['speculation']['tokens_per_step']:.2f}")


if __name__ == "__main__":
    harness.run(main, config="configs/train_tiny.py")
