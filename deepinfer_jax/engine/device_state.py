"""All device memory of an engine, one donated tree: what outlives a step.

Legend: R rows of a flight, N drafts (nextn), V ids, D hidden size, L ids an n-gram reaches back.
Number 0 of blocks, slots and draft slots belongs to nobody: padding rows write there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.cache.paged import PagedMemory, create_paged
from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.engine import penalties
from deepinfer_jax.rules import check_cache, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposed:
    """The newest proposals of each draft slot."""

    tokens: jax.Array  # int32 [draft slots, N]
    log_probs: jax.Array  # float32 [draft slots, N, V] that they were drawn from
    confidence: jax.Array  # float32 [draft slots, N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flight:
    """The newest step, row by row of its plan: what sampling and the next step read of it.

    A prompt's row 0 is its last token; the rows behind it mean nothing.
    """

    start: jax.Array  # int32 [R] position of row 0
    count: jax.Array  # int32 [R] query rows; 0: idle
    tokens: jax.Array  # int32 [R, N + 1] ids of the rows, V for none
    tail: jax.Array  # int32 [R, L] ids before row 0, negative for none
    hidden: jax.Array  # [R, N + 1, D] before the last norm
    accepted: jax.Array  # int32 [R] drafts accepted, once sampled
    final: jax.Array  # int32 [R] the token behind them: row 0 of the next step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """See the module."""

    memory: PagedMemory  # bound to nothing between two steps
    proposed: Proposed
    flight: Flight
    history: jax.Array  # int32 [slots, V], `penalties`; kept for requests that have some
    visits: jax.Array  # int32 [W, L, E] rows of the newest W decode steps that each expert got
    decoded: jax.Array  # int32 [] decode steps so far; the newest is at (decoded - 1) % W


def reach(model: ModelConfig) -> int:
    """Ids before a row that n-grams look at."""
    return model.engram.max_ngram - 1 if model.engram else 0


def create_state(
    model: ModelConfig,
    config: EngineConfig,
    *,
    rows: int,
    format: str = "values",
    dtype: DTypeLike = jnp.bfloat16,
    window: int = 0,
) -> DeviceState:
    """Empty memory for an engine.

    Args:
      rows: of a flight, at least max_num_seqs.
      format: of the memory, "values" or "bytes".
      dtype: of the model.
      window: decode steps whose routing is counted, W.

    Raises:
      ValueError: drafts asked of a model without a drafter, or a cache that does not fit.
    """
    check_cache(model, config.cache)
    nextn, vocabulary = config.cache.nextn, model.vocab_size
    require(
        nextn == 0 or model.draft is not None,
        f"nextn is {nextn} and the model has no drafter; set CacheConfig.nextn to 0",
    )
    seats = config.max_num_seqs + 1

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return DeviceState(
        memory=create_paged(
            model,
            config.cache,
            blocks=config.num_blocks,
            slots=config.num_slots,
            format=format,
            dtype=dtype,
        ),
        proposed=Proposed(
            ints(seats, nextn),
            jnp.zeros((seats, nextn, vocabulary), jnp.float32),
            jnp.zeros((seats, nextn), jnp.float32),
        ),
        flight=Flight(
            start=ints(rows),
            count=ints(rows),
            tokens=ints(rows, nextn + 1),
            tail=ints(rows, reach(model)),
            hidden=jnp.zeros((rows, nextn + 1, model.hidden_size), dtype),
            accepted=ints(rows),
            final=ints(rows),
        ),
        history=penalties.create(config.num_slots, vocabulary),
        visits=ints(window, model.num_layers, model.num_experts),
        decoded=ints(),
    )


def count_visits(state: DeviceState, visits: jax.Array) -> DeviceState:
    """The state with a decode step's routing int32 [L, E] counted, if it counts any."""
    window = state.visits.shape[0]
    if window == 0:
        return state
    counted = state.visits.at[state.decoded % window].set(visits)
    return dataclasses.replace(state, visits=counted, decoded=state.decoded + 1)


def write_rows(flight: Flight, at: Any, **fields: jax.Array) -> Flight:
    """The flight with `fields` in rows at, at + 1, ..."""
    new = {
        name: jax.lax.dynamic_update_slice_in_dim(
            getattr(flight, name), value.astype(getattr(flight, name).dtype), at, axis=0
        )
        for name, value in fields.items()
    }
    return dataclasses.replace(flight, **new)
