"""Constrained answers parse, whatever the logits and drafts; failures stay with their request."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_jax.engine.grammar import Compiler, Constraint, batch_masks
from deepinfer_jax.engine.sampling import RowContext, pack, process
from deepinfer_jax.engine.sampling_params import Grammar, SamplingLimits, SamplingParams
from deepinfer_jax.engine.verify import Proposals, noise, verify

V, EOS, N = 300, 1, 3
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LARK = 'start: "(" (start | "x") ")"'
GRAMMARS = [
    (Grammar("regex", "(ab|cd){1,4}é?"), lambda t: re.fullmatch("(ab|cd){1,4}é?", t)),
    (Grammar("json", json.dumps(SCHEMA)), lambda t: set(json.loads(t)) == {"a", "b"}),
    (
        Grammar("ebnf", LARK),
        lambda t: t == "(" * (len(t) // 2) + "x" + ")" * (len(t) // 2) and len(t) > 1,
    ),
]


def small_tokenizer() -> Tokenizer:
    """Bytes, a few merges, and ids above the tokeniser's own that belong to the model only."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(['{"a": true, "b": "x"} false ababcd é'] * 3, trainer)
    return found


TOKENIZER = small_tokenizer()
COMPILER = Compiler(TOKENIZER, V, EOS, workers=1)


def compiled(grammar: Grammar) -> Constraint:
    found = COMPILER.submit(grammar)
    found.future.exception(timeout=60)
    result = found.poll()
    assert isinstance(result, Constraint), result
    return result


CONSTRAINTS = [compiled(g) for g, _ in GRAMMARS]


@jax.jit
def step(logits, packed, row, count):  # type: ignore[no-untyped-def]
    points = jnp.zeros((1, N, V))
    proposals = Proposals(row.drafts, points, jnp.array([True]))
    return verify(proposals, process(logits, packed, row), count, noise(packed.seed, row.positions))


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2), st.integers(0, 2**31), st.sampled_from([0.0, 1.0]))
def test_answers_parse(which: int, seed: int, temperature: float) -> None:
    random, constraint = np.random.default_rng(seed), CONSTRAINTS[which].fork()
    packed = pack([SamplingParams(temperature=temperature)], [seed], [0], sequences=1,
                  vocab_size=V, eos_id=EOS, limits=SamplingLimits())  # fmt: skip
    tokens: list[int] = []
    while EOS not in tokens and len(tokens) < 40:
        ahead, drafts = constraint.fork(), []
        for _ in range(N):  # half of the drafts are such that the grammar allows them
            bits = np.unpackbits(ahead.masks([])[0].view(np.uint8), bitorder="little")[:V]
            allowed = np.flatnonzero(bits)
            drafts.append(int(random.choice(allowed) if random.random() < 0.7 else random.integers(V)))  # fmt: skip
            ahead.advance(drafts[-1:])
        proposed = np.array([drafts], np.int32)
        row = RowContext(
            positions=np.arange(len(tokens), len(tokens) + N + 1, dtype=np.int32)[None],
            drafts=proposed,
            slots=np.zeros(1, np.int32),
            mask=batch_masks([constraint], proposed, V),
        )
        logits = random.normal(size=(1, N + 1, V)).astype(np.float32) * 3
        logits[..., drafts] += 3
        logits[..., [EOS, TOKENIZER.token_to_id(")")]] += 4
        logits[..., TOKENIZER.token_to_id("x")] += 3
        verdict = step(logits, packed, row, np.array([N + 1], np.int32))
        emitted = np.asarray(verdict.tokens)[0, : int(verdict.count[0])].tolist()
        emitted = emitted[: emitted.index(EOS) + 1] if EOS in emitted else emitted
        constraint.advance(emitted)
        assert not constraint.error
        tokens += emitted
    if EOS in tokens:
        assert constraint.finished
        assert GRAMMARS[which][1](TOKENIZER.decode(tokens[:-1]))


def test_masks_along_drafts_and_back() -> None:
    a, b, c, d = (TOKENIZER.token_to_id(x) for x in "abcd")
    constraint = CONSTRAINTS[0].fork()
    before = constraint.masks([])

    def allows(mask: np.ndarray, token: int) -> bool:
        return bool(mask[token // 32] >> (token % 32) & 1)

    rows = constraint.masks([a, b, b])
    np.testing.assert_array_equal(constraint.masks([]), before)
    np.testing.assert_array_equal(rows[0], before[0])
    assert [[allows(r, t) for t in (a, b, c, d, EOS)] for r in rows[:3]] == [
        [True, False, True, False, False],
        [False, True, False, False, False],
        [True, False, True, False, True],
    ]
    assert (rows[3] == -1).all()  # behind the refused draft
    assert not any(allows(before[0], t) for t in range(TOKENIZER.get_vocab_size(), V))


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "(("), Grammar("json", '{"type": "nonsense"}'), Grammar("json", "{"),
     Grammar("ebnf", "start: missing")],
)  # fmt: skip
def test_a_wrong_grammar_is_reported(grammar: Grammar) -> None:
    found = COMPILER.submit(grammar)
    found.future.exception(timeout=60)
    assert isinstance(found.poll(), str)


def test_a_refused_token_fails_one_request_only() -> None:
    bad, good = CONSTRAINTS[0].fork(), CONSTRAINTS[0].fork()
    bad.advance([TOKENIZER.token_to_id("x")])
    assert bad.error
    masks = batch_masks([bad, None, good], np.zeros((3, N), np.int32), V)
    assert (masks[:2] == -1).all()
    assert not (masks[2, 0] == -1).all()
    assert not good.error


def test_too_late_is_an_error_and_waiting_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Compiler(TOKENIZER, V, EOS, workers=1, timeout=0.05)
    monkeypatch.setattr(slow, "_compile", lambda grammar: time.sleep(0.4))
    found = slow.submit(Grammar("regex", "a"))
    assert found.poll() is None
    time.sleep(0.1)
    assert "too long" in str(found.poll())
    slow.close()
