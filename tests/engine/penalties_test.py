"""Penalties against plain loops over each request's own history."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine import penalties

SLOTS, VOCABULARY, PROMPT, ROWS = 3, 7, 4, 3
token = st.integers(0, VOCABULARY)  # V itself: padding


@jax.jit
def run(logits, wishes, slots, prompt, first, second, drafts):  # type: ignore[no-untyped-def]
    """A prompt, two emitting steps, then the penalties of a verify step."""
    history = penalties.create(SLOTS, VOCABULARY)
    history = penalties.see_prompt(history, slots, prompt)
    for tokens in (first, second):
        history = penalties.see_output(history, slots, tokens)
    return penalties.penalise(logits, *wishes, history, slots, drafts)


def slow(logits: np.ndarray, wish: np.ndarray, prompt: list, output: list) -> np.ndarray:
    """One row, one token id after the other."""
    repetition, presence, frequency = wish
    out = logits.astype(np.float64).copy()
    for v in range(VOCABULARY):
        if v in prompt or v in output:
            out[v] = out[v] / repetition if out[v] > 0 else out[v] * repetition
        out[v] -= presence * (v in output) + frequency * output.count(v)
    return out


@st.composite
def cases(draw):  # type: ignore[no-untyped-def]
    """Two sequences in two of three slots."""
    slots = draw(st.permutations(range(SLOTS)))[:2]
    shape = {"prompt": PROMPT, "first": ROWS, "second": ROWS, "drafts": ROWS - 1}
    ids = {k: draw(st.lists(st.lists(token, min_size=n, max_size=n), min_size=2, max_size=2))
           for k, n in shape.items()}  # fmt: skip
    wishes = draw(
        st.tuples(*[st.tuples(x, x) for x in (st.sampled_from([1.0, 0.5, 1.3]),
                    st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, -0.4, 1.1]))])
    )  # fmt: skip
    return slots, ids, np.array(wishes, np.float32), draw(st.integers(0, 2**31))


@settings(deadline=None, max_examples=100)
@given(cases())
def test_equals_plain_loops(case) -> None:  # type: ignore[no-untyped-def]
    slots, ids, wishes, seed = case
    logits = np.random.default_rng(seed).normal(size=(2, ROWS, VOCABULARY)).astype(np.float32)
    arrays = {k: np.array(v, np.int32) for k, v in ids.items()}
    found = run(logits, tuple(wishes), np.array(slots, np.int32), **arrays)
    for s in range(2):
        real = {k: [t for t in v[s] if t < VOCABULARY] for k, v in ids.items()}
        for row in range(ROWS):
            drafts = [t for t in ids["drafts"][s][:row] if t < VOCABULARY]
            output = real["first"] + real["second"] + drafts
            expected = slow(logits[s, row], wishes[:, s], real["prompt"], output)
            np.testing.assert_allclose(found[s, row], expected, rtol=1e-5, atol=1e-5)


def test_neutral_penalties_change_no_bit_and_a_new_tenant_sees_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(1, ROWS, VOCABULARY)).astype(np.float32)
    history = penalties.see_output(
        penalties.create(SLOTS, VOCABULARY), np.array([1]), np.array([[2]])
    )
    drafts, slot = np.full((1, ROWS - 1), VOCABULARY), np.array([1])
    neutral = [np.array([x], np.float32) for x in (1, 0, 0)]
    same = penalties.penalise(logits, *neutral, history, slot, drafts)
    np.testing.assert_array_equal(same, logits)
    hard = [np.array([x], np.float32) for x in (2, 1, 1)]
    assert not np.array_equal(penalties.penalise(logits, *hard, history, slot, drafts), logits)
    emptied = penalties.forget(history, slot)
    np.testing.assert_array_equal(penalties.penalise(logits, *hard, emptied, slot, drafts), logits)


def test_a_slot_out_of_range_has_no_history() -> None:
    history = penalties.create(SLOTS, VOCABULARY)
    history = penalties.see_output(history, np.array([SLOTS]), np.array([[2, 2]]))
    assert not np.asarray(history).any()
    seen = penalties.seen_by_rows(history + 2, np.array([SLOTS]), np.array([[4]]))
    assert np.asarray(seen)[0].tolist() == [[0] * 7, [0, 0, 0, 0, 2, 0, 0]]
