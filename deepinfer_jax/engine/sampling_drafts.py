"""How drafts are picked when requests sample: from a processed distribution, which is kept.

Verification is lossless for any proposal, as long as it sees the very distribution that was drawn
from; so that is kept, not recomputed, and it may ignore penalties and grammar. The better it
resembles the target's, the more drafts are accepted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.engine.randomness import Use, uniforms
from deepinfer_jax.engine.sampling import PackedSampling, RowContext, draw, process
from deepinfer_jax.engine.verify import Proposals


class DraftSampler:
    """A `model.draft.Choose` for one trace: use it in one `propose`, then take `proposals`."""

    def __init__(self, packed: PackedSampling, first: jax.Array) -> None:
        """`first`: int32 [S], the position that the first draft would take."""
        self.packed, self.first = packed, first
        self.log_probs: list[jax.Array] = []

    def __call__(self, logits: jax.Array, index: int) -> jax.Array:
        """Draw the draft `index`, int32 [S], from logits [S, V]."""
        positions = (self.first + index)[:, None]
        none = jnp.zeros((logits.shape[0], 0), jnp.int32)
        context = RowContext(positions=positions, drafts=none, slots=jnp.zeros_like(self.first))
        log_probs = process(logits[:, None], self.packed, context)[:, 0]
        self.log_probs.append(log_probs)
        number = uniforms(self.packed.seed, self.first, Use.DRAFT + index)
        return draw(jnp.exp(log_probs), number)

    def proposals(self, tokens: jax.Array) -> Proposals:
        """The block int32 [S, N] that was drawn, with its distributions."""
        none = jnp.zeros(tokens.shape[:1], bool)
        return Proposals(tokens, jnp.stack(self.log_probs, axis=1), none)
