"""The law of emitted tokens: enumerated over every number a verification can draw, and exact."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.sampling import MASKED
from deepinfer_jax.engine.verify import Noise, Proposals, verify

check = jax.jit(verify)
BITS = 6  # numbers are multiples of 2**-6 here; all masses too, so a count is a probability
GRID = 1 << BITS
GRID_POINTS = (np.arange(GRID, dtype=np.float32) + 0.5) / GRID


def logs(masses: np.ndarray) -> np.ndarray:
    """Log-probabilities with the mask where a mass is 0."""
    masses = np.asarray(masses, np.float64)
    return np.where(masses > 0, np.log(np.maximum(masses, 1e-300)), MASKED).astype(np.float32)


def exact_law(p: list[Fraction] | int, q: list[Fraction], x: int) -> list[Fraction]:
    """Law of the token at one position given draft x: the definition, on fractions."""
    size = len(q)
    source = [Fraction(int(v == p)) for v in range(size)] if isinstance(p, int) else p
    accept = min(Fraction(1), q[x] / source[x])
    rest = [max(b - a, Fraction(0)) for a, b in zip(source, q, strict=True)]
    total = sum(rest)
    if accept == 1:
        return [Fraction(int(v == x)) for v in range(size)]
    return [accept * (v == x) + (1 - accept) * rest[v] / total for v in range(size)]


def counted_law(p: np.ndarray, q: np.ndarray, x: int, is_point: bool = False) -> np.ndarray:
    """The same from `verify`, each test number and each residual number once."""
    accept, residual = (a.ravel() for a in np.meshgrid(GRID_POINTS, GRID_POINTS, indexing="ij"))
    count, size = len(accept), len(q)
    verdict = check(
        Proposals(
            np.full((count, 1), x, np.int32),
            np.broadcast_to(logs(p), (count, 1, size)),
            np.full(count, is_point),
        ),
        np.broadcast_to(logs(np.stack([q, np.eye(size)[0]])), (count, 2, size)),
        np.full(count, 2, np.int32),
        Noise(accept[:, None], residual[:, None], np.zeros((count, 2), np.float32)),
    )
    first = np.asarray(verdict.tokens)[:, 0]
    return np.bincount(first, minlength=size) / count


dyadic = st.lists(st.integers(0, 16), min_size=2, max_size=2)


@st.composite
def masses(draw) -> list[Fraction]:  # type: ignore[no-untyped-def]
    """Three masses that are sixteenths and sum to 1; zeros are masked ids."""
    cuts = sorted(draw(dyadic))
    return [Fraction(n, 16) for n in (cuts[0], cuts[1] - cuts[0], 16 - cuts[1])]


@settings(deadline=None, max_examples=60)
@given(masses(), masses(), st.booleans())
def test_the_emitted_token_has_the_target_s_law(
    p: list[Fraction], q: list[Fraction], is_point: bool
) -> None:
    """Summed over drafts x ~ p. Counting has an error of one grid cell for each number drawn."""
    emitted, counted = [Fraction(0)] * 3, np.zeros(3)
    for x in range(3):
        if p[x] == 0:
            continue
        given_x = counted_law(np.array(p, float), np.array(q, float), x, is_point)
        exact = exact_law(x if is_point else p, q, x)
        np.testing.assert_allclose(given_x, np.array(exact, float), atol=1.5 / GRID)
        emitted = [e + p[x] * d for e, d in zip(emitted, exact, strict=True)]
        counted += float(p[x]) * given_x
    assert emitted == q
    np.testing.assert_allclose(counted, np.array(q, float), atol=1.5 / GRID)


def one(p, q, x, accept, residual=0.0, fresh=0.0, is_point=False, forced=None):  # type: ignore[no-untyped-def]
    """`verify` for one sequence: p [N, V], q [N + 1, V], x and numbers [N]."""
    n = len(x)
    numbers = [np.broadcast_to(np.float32(a), (1, m)) for a, m in
               ((accept, n), (residual, n), (fresh, n + 1))]  # fmt: skip
    point = np.array([is_point])
    proposals = Proposals(np.array([x], np.int32), logs(np.array([p])), point)
    asked = None if forced is None else np.array([forced], np.int32)
    return check(
        proposals, logs(np.array([q])), np.array([n + 1], np.int32), Noise(*numbers), asked
    )


def test_the_example_of_two_tokens() -> None:
    """p = (.6, .4), q = (.3, .7): draft 0 passes half the time, draft 1 always, residual is 1."""
    p, q = [[0.6, 0.4]], [[0.3, 0.7], [1, 0]]
    assert np.asarray(one(p, q, [0], 0.499).tokens).tolist() == [[0, 0]]
    assert np.asarray(one(p, q, [0], 0.501).tokens).tolist() == [[1, 2]]
    assert np.asarray(one(p, q, [1], 0.999999).tokens).tolist() == [[1, 0]]
    assert float(one(p, q, [0], 0.0).accept_prob[0, 0]) == pytest.approx(0.7)


@pytest.mark.parametrize("x", [-1, 3])
def test_an_id_that_is_none_is_rejected_and_q_is_drawn(x: int) -> None:
    q = [[0.25, 0.5, 0.25], [1, 0, 0]]
    drawn = [
        int(one([[1, 0, 0]], q, [x], 0.0, residual=r, is_point=True).final[0]) for r in GRID_POINTS
    ]
    assert np.bincount(drawn).tolist() == [16, 32, 16]


def test_a_draft_the_target_masks_is_rejected_whatever_the_number() -> None:
    verdict = one([[0.9, 0.1]], [[0, 1], [1, 0]], [0], 0.0)
    assert (int(verdict.accepted[0]), int(verdict.final[0])) == (0, 1)


def test_equal_distributions_accept_everything() -> None:
    same = [0.125, 0.375, 0.5]
    verdict = one([same, same], [same, same, same], [2, 0], 1 - 2.0**-24, fresh=0.99)
    assert np.asarray(verdict.tokens).tolist() == [[2, 0, 2]]
    np.testing.assert_allclose(verdict.accept_prob, 1, rtol=1e-6)


def test_the_first_rejection_ends_the_block_and_rows_beyond_the_count_do_not_count() -> None:
    p, q = np.full((3, 2), 0.5), np.array([[0.5, 0.5]] * 3 + [[0, 1]])
    rejecting = np.array([0.1, 0.99, 0.1])
    q[1] = [0.75, 0.25]
    verdict = one(p, q, [1, 1, 1], rejecting)
    assert np.asarray(verdict.tokens).tolist() == [[1, 0, 2, 2]]
    assert (int(verdict.count[0]), int(verdict.accepted[0])) == (2, 1)
    many = Proposals(np.ones((3, 3), np.int32), np.stack([logs(p)] * 3), np.zeros(3, bool))
    numbers = Noise(*(np.zeros((3, n), np.float32) for n in (3, 3, 4)))
    found = check(many, np.stack([logs(q)] * 3), np.array([0, 1, 3], np.int32), numbers)
    assert np.asarray(found.count).tolist() == [0, 1, 3]
    assert np.asarray(found.tokens).tolist() == [[2] * 4, [0, 2, 2, 2], [1, 1, 0, 2]]
    assert np.asarray(found.accept_prob)[:2].max(axis=1).tolist() == [0, 0]
    assert np.asarray(found.accept_prob)[2].tolist() == [1, 0.75, 0]


def test_forced_tokens_come_out_and_equal_drafts_pass() -> None:
    half = [0.5, 0.5]
    verdict = one([half] * 2, [half] * 3, [1, 1], 0.999, forced=[1, 0, -1])
    assert np.asarray(verdict.tokens).tolist() == [[1, 0, 2]]
    verdict = one([half] * 2, [[1, 0]] * 3, [1, 1], 0.999, forced=[1, 1, 1])
    assert np.asarray(verdict.tokens).tolist() == [[1, 1, 1]]


def test_without_drafts_it_is_a_fresh_draw() -> None:
    """N = 0."""
    none = Proposals(np.zeros((2, 0), np.int32), np.zeros((2, 0, 3), np.float32), np.zeros(2, bool))
    empty = np.zeros((2, 0), np.float32)
    numbers = Noise(empty, empty, np.array([[0.1], [0.9]], np.float32))
    q = np.stack([logs([[0.5, 0.25, 0.25]])] * 2)
    verdict = check(none, q, np.array([1, 1], np.int32), numbers)
    assert np.asarray(verdict.tokens).tolist() == [[0], [2]]


def block_law(p: np.ndarray, q: np.ndarray, drafts: int) -> dict[tuple[int, ...], Fraction]:
    """Law of the first `drafts + 1` tokens, by exact arithmetic over all branches of one step.

    Chains of order one: p[a] and q[a] are the laws after token a, and a run starts after token 0.
    A step that emits fewer tokens is completed by the target itself, as later steps would.
    """
    size, law = len(q), dict[tuple[int, ...], Fraction]()

    def complete(prefix: tuple[int, ...], chance: Fraction) -> None:
        if len(prefix) == drafts + 1:
            law[prefix] = law.get(prefix, Fraction(0)) + chance
            return
        for v in range(size):
            complete((*prefix, v), chance * q[prefix[-1] if prefix else 0][v])

    for x in itertools.product(range(size), repeat=drafts):
        chain = (0, *x)
        alive = Fraction(1)
        for a, b in itertools.pairwise(chain):
            alive *= p[a][b]
        for i in range(drafts):
            if alive == 0:
                break
            before, draft = chain[i], x[i]
            accept = min(Fraction(1), q[before][draft] / p[before][draft])
            rest = [max(b - a, Fraction(0)) for a, b in zip(p[before], q[before], strict=True)]
            for v in range(size):
                if accept < 1:
                    complete((*x[:i], v), alive * (1 - accept) * rest[v] / sum(rest))
            alive *= accept
        if alive:
            complete(x, alive)
    return law


def test_a_block_of_drafts_has_the_chain_s_law() -> None:
    """The rule itself, on fractions: the joint law of all tokens of a step is the target's."""
    third, F = Fraction(1, 3), Fraction
    p = [[F(1, 2), F(1, 4), F(1, 4)], [F(1), F(0), F(0)], [third] * 3]
    q = [[F(1, 8), F(3, 8), F(1, 2)], [F(1, 6), F(5, 6), F(0)], [third] * 3]
    law = block_law(p, q, 3)
    for tokens in itertools.product(range(3), repeat=4):
        expected = Fraction(1)
        for a, b in itertools.pairwise((0, *tokens)):
            expected *= q[a][b]
        assert law.get(tokens, Fraction(0)) == expected


@pytest.mark.slow
def test_blocks_of_drafts_sample_the_chain() -> None:
    """The code, with the engine's own numbers: 40,000 seeds, chi-square of whole blocks."""
    from scipy import stats

    from deepinfer_jax.engine.randomness import Use, seed_words, uniforms
    from deepinfer_jax.engine.sampling import draw
    from deepinfer_jax.engine.verify import noise

    count, drafts = 40_000, 2
    p = np.array([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [0.6, 0.2, 0.2]])
    q = np.array([[0.2, 0.4, 0.4], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    words = seed_words(range(count))
    first = np.full(count, 7, np.int32)
    x, before = [], np.zeros(count, np.int32)
    for i in range(drafts):
        before = np.asarray(draw(p[before].astype(np.float32), uniforms(words, first, 3 + i)))
        x.append(before)
    chain = np.stack([np.zeros(count, np.int32), *x], axis=1)
    positions = first[:, None] + np.arange(drafts + 1, dtype=np.int32)
    verdict = check(
        Proposals(np.stack(x, axis=1), logs(p)[chain[:, :-1]], np.zeros(count, bool)),
        logs(q)[chain],
        np.full(count, drafts + 1, np.int32),
        noise(words, positions),
    )
    tokens = np.array(verdict.tokens)
    for i in range(1, drafts + 1):  # later steps would draw from the target
        number = uniforms(words, first + i, Use.FRESH)
        rest = np.asarray(draw(q[np.minimum(tokens[:, i - 1], 2)].astype(np.float32), number))
        tokens[:, i] = np.where(tokens[:, i] == 3, rest, tokens[:, i])
    seen = np.bincount(tokens @ [9, 3, 1], minlength=27)
    expected = np.einsum("a,ab,bc->abc", q[0], q, q).ravel() * count
    assert stats.chisquare(seen, expected).pvalue > 1e-3
