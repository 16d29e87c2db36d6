"""Drafts come from the distribution that is kept, with numbers of their own block."""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.engine.randomness import seed_words, uniforms
from deepinfer_jax.engine.sampling import draw, pack
from deepinfer_jax.engine.sampling_drafts import DraftSampler
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams

V, N = 6, 3
PARAMS = [SamplingParams(temperature=0), SamplingParams(temperature=0.5, top_k=3)]


def packed(seeds: list[int]):  # type: ignore[no-untyped-def]
    return pack(PARAMS, seeds, [0, 0], sequences=2, vocab_size=V, eos_id=1, limits=SamplingLimits())


@jax.jit
def block(packing, first, table):  # type: ignore[no-untyped-def]
    """A Markov drafter: logits of the next draft by the last one, from token 0."""
    sampler, token, tokens = DraftSampler(packing, first), jnp.zeros(2, jnp.int32), []
    for i in range(N):
        token = sampler(table[token], i)
        tokens.append(token)
    return sampler.proposals(jnp.stack(tokens, axis=1))


TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)


def test_the_kept_distribution_is_the_one_drawn_from() -> None:
    first = np.array([4, 9], np.int32)
    for seed in range(5):
        found = block(packed([seed, seed + 10]), first, TABLE)
        tokens = np.asarray(found.tokens)
        before = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        greedy = np.eye(V)[TABLE.argmax(-1)][before[0]]
        np.testing.assert_array_equal(np.exp(found.log_probs[0]), greedy)
        scores = np.exp(TABLE[before[1]].astype(np.float64) / 0.5)
        scores *= scores >= np.sort(scores)[:, -3:-2]
        law = scores / scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(np.exp(found.log_probs[1]), law, rtol=1e-5)
        assert not np.asarray(found.is_point).any()
        for i in range(N):
            number = uniforms(seed_words([seed, seed + 10]), first, 3 + i)
            assert tokens[1, i] == int(draw(np.float32(law[i]), number[1]))


def test_a_position_s_draft_is_drawn_anew_in_every_block() -> None:
    """Position 6 in blocks from 4, 5 and 6 of 200 seeds: as many agree as chance has it."""
    flat = np.zeros((V, V), np.float32)
    wishes = [SamplingParams()] * 2
    drafts = []
    for first in (4, 5, 6):
        rows = []
        for seed in range(0, 200, 2):
            packing = pack(
                wishes,
                [seed, seed + 1],
                [0, 0],
                sequences=2,
                vocab_size=V,
                eos_id=1,
                limits=SamplingLimits(),
            )
            found = block(packing, np.full(2, first, np.int32), flat)
            rows += np.asarray(found.tokens)[:, 6 - first].tolist()
        drafts.append(np.array(rows))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs((drafts[a] == drafts[b]).mean() - 1 / V) < 0.1
