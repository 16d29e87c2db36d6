"""The processed distribution, draws from it, and rows that know nothing of their neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine import penalties
from deepinfer_jax.engine.sampling import (
    MASKED,
    RowContext,
    draw,
    holds_stop,
    pack,
    process,
    unpack_mask,
)
from deepinfer_jax.engine.sampling_params import SamplingLimits, SamplingParams
from deepinfer_jax.engine.verify import Proposals, noise, verify

V, EOS, SLOTS = 40, 1, 4
LIMITS = SamplingLimits(bias=4, stop_ids=3, logprobs=4)
packed_of = functools.partial(pack, vocab_size=V, eos_id=EOS, limits=LIMITS)
processed = jax.jit(process)
drawn = jax.jit(draw)


def context(positions: np.ndarray, drafts: np.ndarray, **known: object) -> RowContext:
    """Rows with slots 0, 1, ..."""
    slots = np.arange(len(positions), dtype=np.int32)
    return RowContext(positions.astype(np.int32), drafts.astype(np.int32), slots, **known)  # type: ignore[arg-type]


def one(logits: list[float], params: SamplingParams, position: int = 9, prompt: int = 9) -> list:
    """Probabilities of one row; `logits` are padded with ids of no chance to speak of."""
    padded = np.full((1, 1, V), -60, np.float32)
    padded[0, 0, : len(logits)] = logits
    packed = packed_of([params], [0], [prompt], sequences=1)
    row = context(np.array([[position]]), np.zeros((1, 0)))
    return np.exp(processed(padded, packed, row))[0, 0].round(6).tolist()


def test_order_of_the_rules() -> None:
    """Bias before temperature; top-p before top-k's loss; the rest renormalised."""
    logs = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    found = one(logs, SamplingParams(logit_bias={3: float(np.log(4))}))  # 1/2 1/4 1/8 1/2
    np.testing.assert_allclose(found[:4], [4 / 11, 2 / 11, 1 / 11, 4 / 11], atol=2e-6)
    found = one(logs, SamplingParams(temperature=0.5))  # squares
    np.testing.assert_allclose(found[:4], [16 / 22, 4 / 22, 1 / 22, 1 / 22], atol=2e-6)
    found = one(logs, SamplingParams(top_p=0.8, top_k=3))  # masses ahead 0, .5, .75, .875
    np.testing.assert_allclose(found[:4], [4 / 7, 2 / 7, 1 / 7, 0], atol=2e-6)
    found = one(logs, SamplingParams(min_p=0.5))
    np.testing.assert_allclose(found[:4], [2 / 3, 1 / 3, 0, 0], atol=2e-6)


def test_temperature_zero_is_a_point_at_the_lowest_of_the_largest() -> None:
    assert one([1, 3, 3, 2], SamplingParams(temperature=0))[:4] == [0, 1, 0, 0]
    tiny = one([1, 3, 3, 2], SamplingParams(temperature=1e-5))[:4]
    assert tiny == [0, 0.5, 0.5, 0]


def test_stop_ids_wait_for_min_tokens() -> None:
    """min_tokens 2 behind a prompt of 9: positions 9 and 10 cannot stop, 11 can."""
    wish = SamplingParams(temperature=0, min_tokens=2, stop_ids=(2,))
    ids = [one([0, 9, 8, 7], wish, position=at).index(1) for at in (9, 10, 11)]
    assert ids == [3, 3, EOS]
    assert one([0, 9, 8, 7], SamplingParams(temperature=0, ignore_eos=True)).index(1) == EOS
    row = context(np.array([[9]]), np.zeros((1, 0)))
    packed = packed_of([wish], [0], [9], sequences=1)
    stops = [holds_stop(jnp.array([t]), jnp.array([n]), packed)
             for t, n in (([3, 2], 2), ([3, 2], 1), ([EOS, V], 1), ([V, V], 0))]  # fmt: skip
    assert np.asarray(stops).ravel().tolist() == [True, False, True, False]
    assert row.mask is None


def test_masks_are_bits_in_id_order_and_an_empty_one_makes_no_nan() -> None:
    bits = np.zeros((1, 1, 2), np.uint32)
    bits[0, 0] = [1 << 31 | 1 << 3, 1 << 7]
    allowed = np.flatnonzero(unpack_mask(bits.view(np.int32), V)[0, 0])
    assert allowed.tolist() == [3, 31, 39]
    logits = np.random.default_rng(0).normal(size=(2, 1, V)).astype(np.float32)
    mask = np.concatenate([bits.view(np.int32), np.zeros((1, 1, 2), np.int32)])
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        packed = packed_of([params] * 2, [0, 0], [0, 0], sequences=2)
        found = processed(logits, packed, context(np.zeros((2, 1)), np.zeros((2, 0)), mask=mask))
        assert set(np.flatnonzero(found[0, 0] > MASKED)) <= {3, 31, 39}
        assert (np.asarray(found[1]) == MASKED).all()
        assert int(drawn(np.exp(found[1, 0]), np.float32(0.9))) == 0


weights = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@settings(deadline=None, max_examples=50)
@given(weights)
def test_a_draw_inverts_the_sums(row: list[int]) -> None:
    """Whole weights: uniform (k + 1/2) / total falls in the k-th unit."""
    padded = np.array(row + [0] * (9 - len(row)), np.float32)
    units = np.repeat(np.arange(9), padded.astype(int))
    uniform = (np.arange(45) + 0.5) / max(len(units), 1)
    found = drawn(np.broadcast_to(padded, (45, 9)), uniform.astype(np.float32))[: len(units)]
    np.testing.assert_array_equal(found, units)


def test_an_id_of_weight_zero_is_never_drawn() -> None:
    row = np.zeros(9, np.float32)
    row[[2, 6]] = 0.1
    for uniform in (0, 0.5, 1 - 2.0**-24):
        assert int(drawn(row, np.float32(uniform))) in (2, 6)


WISHES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.8, seed=3),
    SamplingParams(top_k=5, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(min_p=0.1, frequency_penalty=0.4, logit_bias={5: 2.0}),
    SamplingParams(),
]


@jax.jit
def whole_step(logits, packed, row, proposals, count):  # type: ignore[no-untyped-def]
    """Process, verify: what a step does with its logits."""
    log_q = process(logits, packed, row)
    return log_q, verify(proposals, log_q, count, noise(packed.seed, row.positions))


def batch(members: list[int], random_seed: int):  # type: ignore[no-untyped-def]
    """Arguments of `whole_step` for requests of fixed content; the rest of 4 rows is padding."""
    n, sequences = 2, 4
    fill = np.random.default_rng(random_seed)
    own = [np.random.default_rng(100 + m) for m in members]

    def stack(make, padding):  # type: ignore[no-untyped-def]
        rows = [make(g) for g in own] + [padding] * (sequences - len(members))
        return np.stack(rows)

    logits = stack(lambda g: g.normal(size=(n + 1, V)), fill.normal(size=(n + 1, V)))
    drafts = stack(lambda g: g.integers(0, V, n), np.full(n, V))
    log_p = stack(lambda g: np.log(g.dirichlet(np.ones(V), n)), np.zeros((n, V)))
    mask = stack(lambda g: g.integers(-(2**31), 2**31, (n + 1, 2)), np.full((n + 1, 2), -1))
    first = stack(lambda g: g.integers(0, 9), 0)
    history = np.zeros((SLOTS, V), np.int32)
    for i, g in enumerate(own):
        history[i] = g.integers(0, 5, V)
    row = context(
        first[:, None] + np.arange(n + 1), drafts, history=history, mask=mask.astype(np.int32)
    )
    packed = packed_of(
        [WISHES[m] for m in members],
        [m + 77 for m in members],
        [0] * len(members),
        sequences=sequences,
    )
    proposals = Proposals(drafts.astype(np.int32), log_p.astype(np.float32), np.zeros(4, bool))
    count = np.array([n + 1] * len(members) + [0] * (sequences - len(members)), np.int32)
    return logits.astype(np.float32), packed, row, proposals, count


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(5)), st.integers(1, 4), st.integers(0, 99))
def test_a_row_s_result_does_not_depend_on_its_batch(order, size, seed) -> None:  # type: ignore[no-untyped-def]
    """Bitwise, whoever else is there (with or without cuts and penalties) and in whatever row."""
    members = list(order[:size])
    log_q, verdict = whole_step(*batch(members, seed))
    for i, m in enumerate(members):
        alone_q, alone = whole_step(*batch([m], seed + 1))
        np.testing.assert_array_equal(log_q[i], alone_q[0])
        for found, expected in zip(
            jax.tree.leaves(jax.tree.map(lambda a, i=i: a[i], vars(verdict))),
            jax.tree.leaves(jax.tree.map(lambda a: a[0], vars(alone))),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)


def toy_logits(tokens: list[int]) -> np.ndarray:
    """A model: logits that depend on the two last tokens, with exact ties."""
    seed = hash(tuple(tokens[-2:])) % 2**32
    return np.random.default_rng(seed).integers(0, 4, V).astype(np.float32)


def generate(params: SamplingParams, n: int, seed: int, length: int = 12) -> list[int]:
    """A loop over whole steps with n drafts that come from a bad drafter, greedy itself."""
    tokens, random = [5, 6, 7], np.random.default_rng(seed)
    history = penalties.see_prompt(
        penalties.create(SLOTS, V), np.array([0]), np.array([tokens], np.int32)
    )
    packed = packed_of([params], [0], [3], sequences=1)
    while len(tokens) < 3 + length:
        drafts: list[int] = []
        for _ in range(n):
            right = int(np.argmax(toy_logits(tokens + drafts)))
            drafts.append(right if random.random() < 0.7 else int(random.integers(V)))
        logits = [toy_logits(tokens + drafts[:j]) for j in range(n + 1)]
        row = RowContext(
            positions=np.arange(len(tokens), len(tokens) + n + 1, dtype=np.int32)[None],
            drafts=np.array([drafts], np.int32).reshape(1, n),
            slots=np.array([0], np.int32),
            history=history,
        )
        points = np.where(np.arange(V) == row.drafts[..., None], 0, MASKED).astype(np.float32)
        proposals = Proposals(row.drafts, points, np.array([False]))
        count = np.array([n + 1], np.int32)
        _, verdict = whole_step(np.array([logits]), packed, row, proposals, count)
        history = penalties.see_output(history, row.slots, verdict.tokens)
        tokens += np.asarray(verdict.tokens)[0, : int(verdict.count[0])].tolist()
    return tokens[: 3 + length]


@pytest.mark.parametrize(
    "wish", [{}, {"repetition_penalty": 1.5, "presence_penalty": 1.0, "min_tokens": 6}]
)
def test_greedy_with_drafts_equals_greedy_without(wish: dict) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, **wish)
    plain = generate(params, 0, 0)
    for seed in range(3):
        assert generate(params, 3, seed) == plain
