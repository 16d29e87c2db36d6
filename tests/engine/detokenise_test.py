"""Pieces join to the whole decode; stop strings are found wherever token borders lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_jax.engine.detokenise import Detokeniser


def byte_tokenizer() -> Tokenizer:
    """Bytes and a few merges."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    found.train_from_iterator(["the end of the story ends", "né 漢字"] * 2, trainer)
    return found


TOKENIZER = byte_tokenizer()
texts = st.text("ab en\u00e9\u6f22\U0001f600", max_size=20)


def run(
    text: str, stop: tuple[str, ...] = (), include: bool = False
) -> tuple[list[str], str | None]:
    out = Detokeniser(TOKENIZER, stop, include)
    pieces = [out.feed([i]) for i in TOKENIZER.encode(text).ids]
    return [*pieces, out.finish()], out.stopped


@settings(deadline=None)
@given(texts)
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces, _ = run(text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in p for p in pieces)


@settings(deadline=None)
@given(
    texts,
    st.lists(st.text("abn\u00e9", min_size=1, max_size=3), min_size=1, max_size=2),
    st.booleans(),
)
def test_the_first_stop_string_to_end_ends_the_text(
    text: str, stop: list[str], include: bool
) -> None:
    """By scanning prefixes; nothing that was given out is taken back."""
    pieces, stopped = run(text, tuple(stop), include)
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    if not ends:
        assert ("".join(pieces), stopped) == (text, None)
        return
    found = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
    assert stopped == found
    assert "".join(pieces) == text[: ends[0] - (0 if include else len(found))]


def test_bytes_that_are_no_text_do_not_wait_for_ever() -> None:
    alone = TOKENIZER.token_to_id("\u00e6")  # byte E6, which begins a character of three
    out = Detokeniser(TOKENIZER)
    pieces = [out.feed([alone]) for _ in range(5)]
    assert pieces[0] == ""
    assert "".join(pieces) + out.finish() == "\ufffd" * 5


@pytest.mark.parametrize(("text", "held"), [("xen", "en"), ("xe", "e"), ("xa", "")])
def test_what_may_begin_a_stop_is_held_back(text: str, held: str) -> None:
    out = Detokeniser(TOKENIZER, ("end",))
    given_out = out.feed(TOKENIZER.encode(text).ids)
    assert given_out + held == text
    assert out.finish() == held
