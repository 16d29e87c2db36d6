"""A device for `scripted.Loop` that runs the tiny model, one sequence at a time, and is greedy.

One executable of a `Scale` serves all engines, prompts and decoding: truncation by mask (a decode
row keeps all), one kind of memory whatever the engine's `keep` and `reserve`. In `TINY` rings have
14 rows: a window of 8 and 6 more. Nothing is rounded to the cache's formats.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache import snapshots
from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig
from deepinfer_jax.engine.images import Images
from deepinfer_jax.engine.plan import PlanRow, RowOutcome, StepPlan
from deepinfer_jax.model import backbone, parameters
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.numerics import EXACT
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.presets import tiny

MODEL = tiny()
MEMORY = CacheConfig(block_tokens=8, nextn=0, backtracking=6, truncation="mask", keep=20)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of an executable: rows of a step, blocks of a table, and the memory's pools."""

    model: ModelConfig
    memory: CacheConfig
    width: int
    table: int
    blocks: int = 40
    slots: int = 4


TINY = Scale(MODEL, MEMORY, 48, 16)
LOOKBACK = MODEL.engram.max_ngram - 1
LEVEL = {"xla_backend_optimization_level": 1}


@functools.cache
def weights():
    """Parameters with enough noise for tokens to depend on all that is remembered."""
    rng = np.random.default_rng(0)

    def draw(leaf: parameters.Leaf) -> jax.Array:
        scale = (leaf.fan_in or leaf.shape[-1]) ** -0.5 if leaf.init == "normal" else 0.05
        noise = scale * rng.normal(size=leaf.shape)
        return jnp.asarray(noise + (leaf.init == "ones"), leaf.dtype or jnp.float32)

    return jax.tree.map(draw, model_parameters(MODEL), is_leaf=parameters.is_leaf)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=LEVEL)
def forward(model, params, memory, tokens, at, lookback, slot, table):
    """(logits [Q, V], memory); at: start, count, kept_start, window_start, global_start."""
    start, count, kept, window, first = (x[None] for x in at)
    rows = text_rows(
        model,
        tokens[None],
        start,
        count,
        lookback=lookback[None],
        kept_start=kept,
        window_start=window,
        global_start=first,
    )
    memory = bind(memory, slot[None], table[None])
    out, memory = backbone.forward(
        params, model, rows, memory, truncation="mask", keep=1, numerics=EXACT
    )
    memory = bind(memory, jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    return backbone.logits(params, model, out.hidden)[0], memory


IMAGES = Images()


class Device:
    """One memory, and the rows of plans run over it in order; the script of a `Loop`."""

    def __init__(self, config: EngineConfig, scale: Scale = TINY) -> None:
        self.config, self.scale = config, scale
        self.memory: PagedMemory = create_paged(
            scale.model,
            scale.memory,
            blocks=scale.blocks,
            slots=scale.slots,
            dtype=jnp.float32,
        )
        self.logits: dict[int, list[np.ndarray]] = {}  # by request, of each sampled row
        self.computed: dict[int, int] = {}  # prompt rows by request

    def __call__(self, plan: StepPlan, i: int) -> RowOutcome:
        row = plan.rows[i]
        self.memory = IMAGES.restore(self.memory, (row,))
        keep = kept_start(self.config.cache, row) if plan.is_prompt else 0
        out = self.run(row, keep)
        if plan.is_prompt:
            self.computed[row.request_id] = self.computed.get(row.request_id, 0) + row.q
        if not row.last_chunk:
            return RowOutcome()
        self.logits.setdefault(row.request_id, []).append(out)
        return RowOutcome((int(out.argmax()),))

    def snapshot(self, slot: int, position: int) -> snapshots.Image:
        """For a `PrefixCache`."""
        return IMAGES.take(self.memory, slot, position)

    def poison(self, value: float) -> None:
        """Every ring, raw row and page becomes `value`."""
        leaves = ("windows", "raw", "rows", "keys")
        full = {
            name: jax.tree.map(lambda x: jnp.full_like(x, value), getattr(self.memory, name))
            for name in leaves
        }
        self.memory = dataclasses.replace(self.memory, **full)

    def run(self, row: PlanRow, kept: int) -> np.ndarray:
        """Logits of the row's last token."""
        tokens = np.zeros(self.scale.width, np.int32)
        lookback = np.full(LOOKBACK, -1, np.int32)
        tokens[: row.q] = row.tokens
        if row.lookback:
            lookback[-len(row.lookback) :] = row.lookback
        at = np.array([row.start, row.q, kept, row.swa_valid_start, row.store_from], np.int32)
        table = np.zeros(self.scale.table, np.int32)
        table[: len(row.blocks)] = row.blocks
        out, self.memory = forward(
            self.scale.model,
            weights(),
            self.memory,
            tokens,
            at,
            lookback,
            np.int32(row.slot),
            table,
        )
        return np.asarray(out[row.q - 1])


def kept_start(cache: CacheConfig, row: PlanRow) -> int:
    """Where the decoder's windows begin: L - keep, L all tokens of the prompt."""
    return row.total - cache.keep if cache.truncation != "off" else 0


def prompt(length: int, seed: int) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, length).tolist()
