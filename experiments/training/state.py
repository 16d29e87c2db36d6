"""Training steps: Flax's train state, Adam on a cosine, and routing kept even by its bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax.training.train_state import TrainState

from deepinfer_jax.config import ModelConfig
from experiments.training import losses, whole

Step = Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def create(params: Any, steps: int, rate: float) -> TrainState:
    """A state whose learning rate rises to `rate` and falls to a twentieth over `steps` steps."""
    warmup = max(1, min(20, steps // 5))
    schedule = optax.warmup_cosine_decay_schedule(
        0, rate, warmup, max(steps, warmup + 1), rate / 20
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))
    return TrainState.create(apply_fn=whole.forward, params=params, tx=tx)


def balance(layers: tuple[Any, ...], visits: jax.Array, speed: float) -> tuple[Any, ...]:
    """The layers with the bias of experts visited less than average raised by `speed`, others cut.

    The rule without an auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    sign = jnp.sign(visits.mean(-1, keepdims=True) - visits)

    def moved(layer: Any, step: jax.Array) -> Any:
        return {**layer, "moe": {**layer["moe"], "bias": layer["moe"]["bias"] + speed * step}}

    return tuple(moved(layer, step) for layer, step in zip(layers, sign, strict=True))


def backbone_step(config: ModelConfig, speed: float) -> Step:
    """step(state, tokens [S, T]) -> (state, {loss, index_loss, visits})."""

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        graded = jax.value_and_grad(losses.backbone_loss, has_aux=True)
        (_, (nats, index, visits)), grads = graded(state.params, config, tokens)
        state = state.apply_gradients(grads=grads)
        layers = balance(state.params["layers"], visits, speed)
        state = state.replace(params={**state.params, "layers": layers})
        return state, {"loss": nats, "index_loss": index, "visits": visits}

    return jax.jit(step, donate_argnums=0)


def draft_step(config: ModelConfig, anchors: int, distilled: float) -> Step:
    """step(state of the drafter's weights, whole tree, tokens [S, T], key) -> (state, numbers)."""
    assert config.draft is not None
    block = config.draft.block_size

    def step(
        state: TrainState, params: Any, tokens: jax.Array, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        made = whole.forward(params, config, tokens)
        at = jax.random.randint(key, (tokens.shape[0], anchors), 1, tokens.shape[1] - block)
        graded = jax.value_and_grad(losses.draft_loss, has_aux=True)
        (_, (nats, confidence, accepted)), grads = graded(
            state.params, params, config, tokens, made, at, distilled
        )
        numbers = {"draft_loss": nats, "confidence_loss": confidence, "accepted": accepted}
        return state.apply_gradients(grads=grads), numbers

    return jax.jit(step, donate_argnums=0)
