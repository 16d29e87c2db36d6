"""Continues a prompt with the tiny trained model, greedily, on a paged memory.

  python -m experiments.generate --config=configs/tiny.py --prompt="def "
  python -m experiments.generate --config=configs/tiny.py --prompt="def " --config.speculate=true

With `speculate`, the drafter proposes a block per step and the longest matching run is kept; the
text is the same, in fewer steps. A workdir gets the tokens in summary.json.
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
from absl import flags, logging

from deepinfer_jax import presets
from deepinfer_jax.report import records
from experiments import harness
from experiments.training import store
from experiments.training.decoding import Decoder

PROMPT = flags.DEFINE_string("prompt", "def ", "The text to continue.")


def main(run: harness.Run) -> None:
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    settings = run.parameters
    if not PROMPT.value:
        raise ValueError("--prompt is empty; give the text to continue")
    model = getattr(presets, settings["model"])()
    params, tokenizer = store.load(pathlib.Path(settings["checkpoint"]), model)
    decoder = Decoder(
        params,
        model,
        context=settings["context"],
        drafts=model.draft.block_size if settings["speculate"] and model.draft else 0,
        chunk=settings["chunk"],
        format=settings["format"],
    )
    prompt = np.array([model.bos_token_id, *tokenizer.encode(PROMPT.value).ids], np.int32)
    limit, stop = settings["max_new_tokens"], model.eos_token_id
    decoder.check(prompt, limit)
    print("compiling, up to a minute or two", file=sys.stderr)
    list(decoder.generate(prompt[:1], 2, stop=-1))
    made, steps, shown, began = [], 0, 0, time.perf_counter()
    print(PROMPT.value, end="", flush=True)
    for step in decoder.generate(prompt, limit, stop):
        made += np.asarray(step.tokens)[: int(step.accepted) + 1].tolist()
        made = made[:limit]
        made = made[: made.index(stop)] if stop in made else made
        text = tokenizer.decode(made)
        print(text[shown:], end="", flush=True)
        steps, shown = steps + 1, len(text)
    seconds = time.perf_counter() - began
    per_step = (len(made) - 1) / max(steps - 1, 1)
    print(f"\n{len(made) / seconds:.1f} tokens/s, {per_step:.2f} tokens per step after the prompt")
    if run.workdir:
        found = {"prompt": PROMPT.value, "text": tokenizer.decode(made), "tokens": made}
        speed = {"seconds": seconds, "tokens_per_step": per_step}
        records.write_json(run.workdir / "summary.json", {**found, **speed})


if __name__ == "__main__":
    harness.run(main, config="configs/tiny.py")
