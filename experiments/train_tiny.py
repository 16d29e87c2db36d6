"""Trains a model of about two million parameters on Python sources, then its drafter.

  python -m experiments.train_tiny --config=configs/train_tiny.py --workdir=runs/tiny
  python -m experiments.train_tiny --config=configs/train_tiny.py:smoke --workdir=runs/smoke

The workdir gets the checkpoint (`checkpoint/`), results.jsonl with the losses on the way, plots/,
routing.json with visits per expert, and summary.json: held-out loss beside unigram and bigram
counts, acceptance per draft position on the cached path, calibration of the confidence head. The
same command goes on where a killed run was.
"""

from __future__ import annotations

import functools
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax.training.train_state import TrainState

from deepinfer_jax import presets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import initialise
from deepinfer_jax.report import records
from deepinfer_jax.report.page import Plot
from deepinfer_jax.report.table import table
from deepinfer_jax.report.write import write_plots
from experiments import harness
from experiments.training import baselines, figures, measure, resume, state, store, text
from experiments.training.decoding import Decoder


def train(
    model: ModelConfig,
    stream: np.ndarray,
    settings: dict[str, Any],
    seed: int,
    workdir: pathlib.Path | None = None,
) -> Any:
    """Weights after both phases; `workdir` gets states to go on from and points.jsonl."""
    size, length, every = settings["batch"], settings["context"], settings["save_every"]
    kept = workdir / "state" if workdir else None
    key = jax.random.key(seed)

    def phase(name: str, number: int, made: TrainState, step: Callable[..., Any]) -> TrainState:
        of, began = settings[name]["steps"], time.perf_counter()
        states = resume.States(kept / name if kept else None, every)
        done, made = states.latest(made)
        since: list[dict[str, jax.Array]] = []  # the last point
        for i in range(done + 1, of + 1):
            random = np.random.default_rng((seed, number, i))
            tokens = jnp.asarray(text.batch(stream, size, length, random))
            made, numbers = step(made, tokens, jax.random.fold_in(key, i))
            since.append(numbers)
            if i % settings["log_every"] == 0 or i == of:
                mean = jax.tree.map(lambda *x: np.mean(x, 0), *jax.device_get(since))
                _note(workdir, name, i, of, mean, time.perf_counter() - began)
                since = []
            states.keep(i, made, last=i == of)
        states.close()
        return made

    part = settings["backbone"]
    params = jax.jit(functools.partial(initialise, model_parameters(model)))(key)
    step = state.backbone_step(model, part["balance_speed"])
    backbone = state.create(params, part["steps"], part["rate"])
    params = phase("backbone", 0, backbone, lambda made, tokens, _: step(made, tokens)).params
    part = settings["draft"]
    drafting = state.draft_step(model, part["anchors"], part["distilled"])
    drafter = state.create(jax.tree.map(jnp.copy, params["draft"]), part["steps"], part["rate"])
    drafter = phase("draft", 1, drafter, lambda made, *rest: drafting(made, params, *rest))
    return {**params, "draft": drafter.params}


def _note(
    workdir: pathlib.Path | None,
    phase: str,
    step: int,
    of: int,
    numbers: dict[str, np.ndarray],
    seconds: float,
) -> None:
    """Print a point of the run and keep it.

    Args:
      numbers: means over the steps since the point before.
      seconds: those since the phase was taken up.
    """
    plain = {k: v.tolist() for k, v in numbers.items()}
    if workdir:
        row = {"phase": phase, "step": step, "seconds": seconds, **plain}
        records.append_jsonl(workdir / "points.jsonl", row)
    shown = ", ".join(f"{k} {np.round(v, 3).tolist()}" for k, v in plain.items() if k != "visits")
    print(f"{phase} {step}/{of}: {shown}, {seconds:.0f} s", flush=True)


def decoders(params: Any, model: ModelConfig, settings: dict[str, Any]) -> tuple[Decoder, Decoder]:
    """With drafts and without."""
    speculative, plain = (
        Decoder(
            params,
            model,
            context=settings["context"],
            drafts=drafts,
            chunk=settings["held_out"]["prompt"],
            format="values",
        )
        for drafts in (model.draft.block_size if model.draft else 0, 0)
    )
    return speculative, plain


def calibrate(params: Any, decoder: Decoder, unseen: np.ndarray, settings: dict[str, Any]) -> Any:
    """Weights whose confidence is right on average, on prompts that are not measured.

    The head is trained on the text; what it is asked about are tokens the model chose itself.
    """
    part = settings["held_out"]
    tokens = text.stretches(unseen, part["stretches"], settings["context"])
    decoder.use(params)
    prompts = tokens[-part["calibration"] :, : part["prompt"]]
    scale = measure.confidence_scale(*measure.drafted(decoder, prompts, part["generated"]))
    own = params["draft"]
    return {**params, "draft": {**own, "confidence": own["confidence"] * scale}}


def summarise(
    params: Any,
    model: ModelConfig,
    stream: np.ndarray,
    unseen: np.ndarray,
    settings: dict[str, Any],
    pair: tuple[Decoder, Decoder],
) -> dict[str, Any]:
    """Everything measured on held-out text; `pair` is what `decoders` makes."""
    part = settings["held_out"]
    tokens = text.stretches(unseen, part["stretches"], settings["context"])
    for decoder in pair:
        decoder.use(params)
    prompts = tokens[: part["prompts"], : part["prompt"]]
    return {
        "training_tokens": len(stream),
        "held_out_tokens": len(unseen),
        "held_out": measure.held_out(params, model, tokens),
        "baselines": baselines.losses(stream, tokens, model.vocab_size),
        "speculation": measure.speculation(*pair, prompts, part["generated"]),
    }


def write(workdir: pathlib.Path, summary: dict[str, Any], settings: dict[str, Any]) -> None:
    """results.jsonl, summary.json, routing.json and plots/ of a run whose points are kept."""
    points = {(p["phase"], p["step"]): p for p in records.read_jsonl(workdir / "points.jsonl")}
    records.write_jsonl(workdir / "results.jsonl", points.values(), len(points))
    records.write_json(workdir / "summary.json", {**records.environment(), **summary})
    routing = {
        "model": settings["model"],
        "tokens": settings["held_out"]["stretches"] * settings["context"],
        "visits": summary["held_out"]["visits"],  # [layer][expert]
    }
    records.write_json(workdir / "routing.json", routing)
    drawn = [
        Plot("loss", "", "", figures.losses(list(points.values()), summary)),
        Plot("acceptance", "", "", figures.acceptance(summary["speculation"])),
    ]
    write_plots(workdir, drawn)


def show(summary: dict[str, Any]) -> None:
    """The figures that matter, on the terminal."""
    losses = {"model": summary["held_out"]["nats"], **summary["baselines"]}
    print(table([{"held-out nats per token": k, "": f"{v:.3f}"} for k, v in losses.items()]))
    found = summary["speculation"]
    rows = [
        {"draft": i + 1, **{k: f"{row[k]:.3f}" for k in ("accepted", "confidence")}}
        for i, row in enumerate(found["calibration"]["positions"])
    ]
    print(table(rows, title="Drafts, given that all before were accepted"))
    print(
        f"{found['tokens_per_step']:.2f} tokens per step; the same text as without drafts for "
        f"{found['same_text']:.0%} of {found['prompts']} prompts; confidence off by "
        f"{found['calibration']['expected_error']:.3f} on average"
    )


def main(run: harness.Run) -> None:
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    settings = run.parameters
    model = getattr(presets, settings["model"])()
    if run.workdir and not run.resuming:
        shutil.rmtree(run.workdir / "state", ignore_errors=True)  # of a run that was overwritten
    training, unseen = text.sources(settings["characters"])
    tokenizer = text.train_tokenizer(training[::4], model.vocab_size)
    stream, held_out = (text.encode(tokenizer, texts) for texts in (training, unseen))
    params = train(model, stream, settings, run.seed, run.workdir)
    params = jax.device_put(params, jax.devices()[0])  # as loaded weights are: compiled once
    pair = decoders(params, model, settings)
    params = calibrate(params, pair[0], held_out, settings)
    if run.workdir:
        store.save(run.workdir / "checkpoint", params, tokenizer, model)
        params, _ = store.load(run.workdir / "checkpoint", model)  # measured as it is served
    summary = summarise(params, model, stream, held_out, settings, pair)
    if run.workdir:
        write(run.workdir, summary, settings)
    show(summary)


if __name__ == "__main__":
    harness.run(main, config="configs/train_tiny.py", resumable=True)
