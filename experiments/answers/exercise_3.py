"""768, 640 and 134 of a 902-token prompt, and the six rows that a keep of 140 asks for besides."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from deepinfer_jax import presets
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, TICKS_PER_SECOND, StepCost
from deepinfer_jax.layout import block_layout
from deepinfer_jax.policy.prefix import BLOCK_TOKENS
from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.traces import Trace, offsets, plain
from deepinfer_jax.simulator.workload import workload
from experiments import batch
from experiments.answers.answer import Answer, Exercise, Prediction

PRESENT, MISSING, LARGER = "SWA present", "SWA missing", "SWA present, reserve = keep"
GAP_SECONDS = 10
"""Between two arrivals: no request waits for another."""
SHOWN = 16
"""Prompt lengths in the figure; the lengths beyond repeat its last value."""


def lengths(section: Mapping[str, Any]) -> np.ndarray:
    """The prompt and the 127 next longer ones: every remainder of a block once."""
    return section["prompt"] + np.arange(BLOCK_TOKENS)


def trace(prompts: np.ndarray) -> Trace:
    """Prompts that begin alike, one every `GAP_SECONDS`, with one output token each."""
    arrival = (1 + np.arange(len(prompts))) * GAP_SECONDS * TICKS_PER_SECOND
    made = plain("one shared prefix", arrival, prompts, np.ones_like(prompts))
    return dataclasses.replace(
        made,
        block_tokens=BLOCK_TOKENS,
        run_first=np.zeros(len(prompts), np.int64),
        run_count=prompts // BLOCK_TOKENS,
        run_offsets=offsets(np.ones(len(prompts), np.int64)),
    )


def cluster(section: Mapping[str, Any], reserve: int, ttl: int) -> ClusterConfig:
    """One engine with a shared store; window states live for `ttl` ticks; a token takes 1 ms."""
    block = block_layout(presets.v41_flash(), CacheConfig()).payload
    millisecond = FEMTOSECONDS_PER_SECOND // 1000
    cost = StepCost(0, millisecond, 0, 0, 0, 0, [[millisecond, 0, 0]], 0, 0)
    return ClusterConfig(
        modes=(Mode.NORMAL,),
        cost=cost,
        cache_scope="shared",
        reserve=reserve,
        swa=True,
        swa_ttl_ticks=ttl,
        block_bytes=block,
        fetch_femtoseconds_per_byte=1,
        warm_requests=(0, BLOCK_TOKENS - 1),  # publish blocks and leave states at both hit lengths
    )


def cases(section: Mapping[str, Any]) -> dict[str, ClusterConfig]:
    return {
        PRESENT: cluster(section, section["reserve"], FOREVER),
        MISSING: cluster(section, section["reserve"], 1),
        LARGER: cluster(section, section["keep"], FOREVER),
    }


def split_up(length: int, block_hit: int, restart: int, keep: int) -> dict[str, int]:
    """What a prompt's positions are, and the retained rows that nothing fills."""
    return {
        "block hit L1": block_hit,
        "restart H": restart,
        "rebuild SWA": block_hit - restart,
        "new": length - block_hit,
        "first kept row": length - keep,
        "unfilled rows": max(0, restart - (length - keep)),
    }


def predict(section: Mapping[str, Any], seed: int) -> Prediction:
    """By the chapter's two formulas, written out here: the simulator asks `policy.prefix`."""
    del seed
    keep = section["keep"]
    values: dict[str, list[dict[str, int]]] = {}
    for name, made in cases(section).items():
        values[name] = []
        for n in lengths(section).tolist():
            hit = 128 * ((n - made.reserve) // 128)
            restart = max(0, hit - 128) if name == MISSING else hit
            values[name].append(split_up(n, hit, restart, keep))
    prompts = lengths(section)
    one, missing = values[PRESENT][0], values[MISSING][0]
    return Prediction(
        f"L1 = 128 floor(({prompts[0]} - {section['reserve']}) / 128) = {one['block hit L1']} "
        "tokens of block KV are reused with the window state or without. With it the computation "
        f"restarts there and {one['new']} positions are new; without it it restarts at "
        f"{missing['restart H']} and {missing['rebuild SWA']} positions only rebuild the state. "
        f"Keeping {keep} rows means from {one['first kept row']} on: {one['unfilled rows']} rows "
        "before the restart are neither computed nor restored.",
        values,
    )


def answer(section: Mapping[str, Any], seed: int, prediction: Prediction) -> Answer:
    del seed
    prompts, made = lengths(section), cases(section)
    runs = batch.run(
        {name: (c, workload(trace(prompts), BLOCK_TOKENS, c.reserve)) for name, c in made.items()}
    )
    values, bytes_read, computed = {}, {}, {}
    for name, run in runs.items():
        t = run.requests
        found = zip(prompts, t.block_hit_tokens, t.compute_hit_tokens, strict=True)
        values[name] = [split_up(int(n), int(b), int(h), section["keep"]) for n, b, h in found]
        bytes_read[name] = int(run.fetched_bytes)
        computed[name] = int(np.rint((t.first_token - t.prefill_start)[0] / 1e6))
    agree = values == dict(prediction.values)
    one, missing, larger = (values[name][0] for name in (PRESENT, MISSING, LARGER))
    gaps = {name: [row["unfilled rows"] for row in rows] for name, rows in values.items()}
    same = "as many" if bytes_read[PRESENT] == bytes_read[MISSING] else "OTHER"
    rows = [{"case": name} | values[name][0] | {"computed": computed[name]} for name in values]
    hit = sum(gap > 0 for gap in gaps[PRESENT])
    return Answer(
        f"{one['block hit L1']} is reused block KV, {missing['restart H']} where computation "
        f"restarts when the window state is missing, {section['reserve']} how many last tokens no "
        f"hit may cover, here also the number of new positions. With the state the engine computed "
        f"{computed[PRESENT]} positions, without it {computed[MISSING]}: "
        f"{missing['rebuild SWA']} of them, [{missing['restart H']}, {missing['block hit L1']}), "
        f"rebuild the state. All blocks below {one['block hit L1']} are reused in both cases: "
        f"the store was read for {same} bytes. A missing state even fills the kept rows, because "
        f"it restarts earlier; a present one leaves {one['unfilled rows']} rows, "
        f"[{one['first kept row']}, {one['restart H']}), that nothing fills. Over the 128 lengths "
        f"from {prompts[0]} on this happens to {hit}, with at most {max(gaps[PRESENT])} rows; a "
        f"reserve of {section['keep']} leaves none and restarts this prompt at "
        f"{larger['restart H']}. So a state that is present does not make a keep of "
        f"{section['keep']} safe under a reserve of {section['reserve']}. "
        + ("Every number is the predicted one." if agree else "THE PREDICTION FAILED."),
        [Table(f"A prompt of {prompts[0]} tokens", rows)],
        [
            Plot(
                "exercise_3",
                f"What the positions of a {prompts[0]}-token prompt are",
                "Left: reused, rebuilding and new positions; the bracket is the suffix to keep. "
                "Right: kept rows before the restart, for the first of 128 prompt lengths; "
                "none at the others.",
                figure(prompts, values, section["keep"]),
            )
        ],
        {
            "agrees": agree,
            "first": {name: rows[0] for name, rows in values.items()},
            "lengths_with_unfilled_rows": hit,
            "fetched_bytes": bytes_read,
        },
    )


def figure(prompts: np.ndarray, values: Mapping[str, list[dict[str, int]]], keep: int) -> Figure:
    """The prompt as a strip per case; unfilled rows over the length."""
    made, (left, right) = style.figure(2, width=9.4, height=3.1)
    style.dress(left, "x")
    for row, rows in enumerate(values.values()):
        one = rows[0]
        edges = [0, one["restart H"], one["block hit L1"], int(prompts[0])]
        for index, (begin, end) in enumerate(itertools.pairwise(edges)):
            left.barh(
                row, end - begin, left=begin, color=style.colour((0, 3, 1)[index]), height=0.5
            )
        kept = [one["first kept row"], int(prompts[0])]
        left.plot(kept, [row - 0.36] * 2, color=style.INK, linewidth=1.6)
        if one["unfilled rows"]:
            begin = one["first kept row"]
            left.annotate(
                f"{one['unfilled rows']} rows unfilled", (begin, row - 0.36), xytext=(-6, 0),
                textcoords="offset points", ha="right", va="center", fontsize=8, color=style.INK,
            )  # fmt: skip
    left.set_yticks(range(len(values)), [name.replace(", ", ",\n") for name in values])
    left.set_ylim(len(values) - 0.5, -0.8)
    left.set_xticks([0, 256, 512, 640, 768, int(prompts[0])])
    left.set_xlabel(f"position (bracket: the {keep} rows to keep)")
    names = ("reused, skipped", "KV reused, computed for SWA", "new")
    handles = [Patch(color=style.colour(c), label=n) for c, n in zip((0, 3, 1), names, strict=True)]
    made.legend(
        handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8,
        labelcolor=style.INK,
    )  # fmt: skip
    style.title(right, "Kept rows before the restart")
    for index, name in enumerate((PRESENT, LARGER, MISSING)):
        y = [row["unfilled rows"] for row in values[name][:SHOWN]]
        options = {"color": style.colour((1, 0, 3)[index]), "markersize": 8 - 2 * index}
        right.plot(prompts[:SHOWN], y, "o-", label=name, linewidth=1.2, **options)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("prompt tokens")
    style.legend(right, loc="upper right")
    return made


EXERCISE = Exercise(
    "What do 768, 640 and 134 mean for a 902-token prompt, what rebuilds a missing window state, "
    "and why does that not settle a keep of 140 rows?",
    predict,
    answer,
)
