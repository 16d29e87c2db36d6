"""What is minimised: next-token loss of the backbone, then the drafter's two losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import draft_keys
from deepinfer_jax.model.numerics import RELEASED, linear, rms_norm
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.model.shares import Shares
from experiments.training import block, whole

INDEX_WEIGHT = 0.1  # Adam forgives its size: almost only the indexer's weights feel this loss


def backbone_loss(
    params: dict[str, Any], config: ModelConfig, tokens: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Loss of tokens [S, T], and (nats per token, index loss, visits [L, E])."""
    made = whole.forward(params, config, tokens)
    nats = next_token_nats(made.logits, tokens).mean()
    return nats + INDEX_WEIGHT * made.index_loss, (nats, made.index_loss, made.visits)


def next_token_nats(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """[S, T - 1]: nats of tokens 1 .. T - 1 under logits [S, T, V] of those before."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])


def draft_loss(
    own: dict[str, Any],
    params: dict[str, Any],
    config: ModelConfig,
    tokens: jax.Array,
    made: whole.Pass,
    anchors: jax.Array,
    distilled: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Loss of the blocks that start at `anchors` [S, A] of tokens [S, T].

    The block at a reads token a and drafts tokens a + 1 .. a + N; its Markov head is given the
    true tokens. Targets are the backbone's distributions (share `distilled`) and the text. A draft
    is called accepted if its most likely token is the backbone's, for verification here is greedy;
    confidence learns that by cross entropy and sends no gradient into the drafter. It is judged
    only behind drafts that were accepted and that the text confirms: elsewhere greedy decoding
    never arrives.

    Args:
      own: the drafter's weights, the only ones that learn.
      params: the whole tree, frozen.
      made: the backbone's pass over `tokens`, without gradients.

    Returns:
      The loss, and (draft nats, confidence loss, accepted share float32 [N]).
    """
    assert config.draft is not None
    count, (sequences, per) = config.draft.block_size, anchors.shape
    owner, at = jnp.repeat(jnp.arange(sequences), per), anchors.reshape(-1)
    seen = at[:, None] + jnp.arange(count)
    previous, following = tokens[owner[:, None], seen], tokens[owner[:, None], seen + 1]
    before = jnp.maximum(at[:, None] - config.window + jnp.arange(config.window), 0)
    stages = _stage_rows(own, config, made, tokens)
    histories = tuple(rows[owner[:, None], before] for rows in stages)
    tree = {**params, "draft": own}
    hidden = block.hidden(tree, config, previous[:, 0], at, histories, count)
    base = linear(rms_norm(hidden, own["norm"], config.norm_eps), params["head"])
    markov = own["markov_embed"][previous]
    logits = base + linear(markov, own["markov_head"])
    judge = made.logits[owner[:, None], seen]
    target = distilled * jax.nn.softmax(judge) + (1 - distilled) * jax.nn.one_hot(
        following, config.vocab_size
    )
    nats = optax.softmax_cross_entropy(logits, target).mean()
    accepted = jnp.argmax(logits, -1) == jnp.argmax(judge, -1)
    reached = _reached(accepted & (following == jnp.argmax(judge, -1)))
    seen_by_confidence = jax.lax.stop_gradient(jnp.concatenate([hidden, markov], axis=-1))
    each = optax.sigmoid_binary_cross_entropy(
        seen_by_confidence @ own["confidence"], accepted.astype(jnp.float32)
    )
    confidence = (each * reached).sum() / reached.sum()
    return nats + confidence, (nats, confidence, accepted.mean(0))


def _reached(right: jax.Array) -> jax.Array:
    """float32 [N, K]: 1 where all drafts before were right [N, K], as when decoding gets there."""
    before = jnp.cumprod(right[:, :-1].astype(jnp.float32), axis=1)
    return jnp.pad(before, ((0, 0), (1, 0)), constant_values=1)


def _stage_rows(
    own: dict[str, Any], config: ModelConfig, made: whole.Pass, tokens: jax.Array
) -> tuple[jax.Array, ...]:
    """Per draft stage [S, T, C]: the rows the backbone leaves for it."""
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    rows = text_rows(config, tokens, start, start + tokens.shape[1])
    memory = draft_keys.remember(
        own,
        config,
        list(made.features),
        Shares(rows, rows),
        create_dense(config, tokens.shape[0], tokens.shape[1]),
        RELEASED,
    )
    return memory.windows[config.num_layers :]
