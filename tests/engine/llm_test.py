"""Generation as a caller sees it: text, several answers, stops, streams, grammars, errors."""

import json
import math

import pytest

from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.sampling_params import Grammar, SamplingParams
from tests.engine.grammar_test import TOKENIZER
from tests.engine.small_engine import BUCKETS

WISH = SamplingParams(temperature=1.0, max_tokens=20, seed=3)


@pytest.fixture(scope="module")
def llm(device: Device) -> LLM:
    """An LLM over the warm device: its programs are those of the other tests."""
    made = LLM(device.params, device.model, device.config, TOKENIZER, buckets=BUCKETS)
    made.engine.device = device
    return made


def test_text_in_text_out_and_the_same_by_ids(llm: LLM) -> None:
    (text,) = llm.generate("abcd", WISH)
    (ids,) = llm.generate([list(text.prompt)], WISH)
    assert text.prompt[0] == llm.model.bos_token_id and text == ids
    (answer,) = text.answers
    assert len(answer.tokens) <= 20 and answer.finish_reason in ("stop", "length")
    kept = [t for t in answer.tokens if t != llm.model.eos_token_id]
    assert answer.text == TOKENIZER.decode(kept)


def test_several_answers_differ_and_the_first_is_the_single_one(llm: LLM) -> None:
    several = SamplingParams(temperature=1.0, max_tokens=20, seed=3, n=3)
    (result,) = llm.generate(["abcd"], several)
    (single,) = llm.generate(["abcd"], WISH)
    assert result.answers[0] == single.answers[0]
    assert len({answer.tokens for answer in result.answers}) == 3


def test_stream_joins_to_the_result_and_progress_counts(llm: LLM) -> None:
    prompts, finished = ["ab", "cd", [5, 6, 7]], []
    results = llm.generate(prompts, WISH, progress=finished.append)
    assert sum(finished) == 3
    for number, result in enumerate(results):
        news = [n for n in llm.generate(prompts, WISH, stream=True) if n.prompt == number]
        assert "".join(n.text for n in news) == result.answers[0].text
        assert tuple(t for n in news for t in n.tokens) == result.answers[0].tokens
        assert [n.finish_reason for n in news][:-1] == [None] * (len(news) - 1)


def test_a_progress_bar_on_request_only(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["ab", "cd"], WISH)
    assert capsys.readouterr().err == ""
    llm.generate(["ab", "cd"], WISH, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_a_stream_left_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.generate(["ab", "cd"], WISH, stream=True)
    next(iter(stream))
    with pytest.raises(ValueError, match="under way"):
        llm.generate("ab", WISH)
    stream.close()  # type: ignore[attr-defined]
    storage = llm.engine.scheduler.roster.storage
    assert not llm.engine.unfinished and storage.blocks.used_count == 0
    assert llm.generate("ab", WISH)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate("abcd", WISH)
    text = free.answers[0].text
    stop = text[5:8]
    wish = SamplingParams(temperature=1.0, max_tokens=20, seed=3, stop=stop)
    (cut,) = llm.generate("abcd", wish)
    assert cut.answers[0].text == text[: text.index(stop)]
    assert cut.answers[0].finish_reason == "stop"
    assert len(cut.answers[0].tokens) < len(free.answers[0].tokens)


def test_log_probabilities_of_answer_and_prompt(llm: LLM) -> None:
    wish = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate([[5, 6, 7, 8]], wish)
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 3
    (answer,) = result.answers
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.tokens)
    for token, report in zip(answer.tokens, answer.logprobs, strict=True):
        assert report.top[0] == (token, report.logprob) and report.rank == 0
        assert report.logprob < 0 and math.exp(report.top[1][1]) < 0.5
    again = llm.generate([[5, 6, 7, 8, *answer.tokens]], wish)[0].prompt_logprobs
    assert again is not None
    for one, two in zip(again[3:], answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_grammars_hold_in_both_loops_and_failures_stay_alone(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    good = SamplingParams(max_tokens=40, seed=1, grammar=Grammar("json", json.dumps(schema)))
    bad = SamplingParams(max_tokens=40, grammar=Grammar("regex", "(ab"))
    results = llm.generate(["x", "x", "abcd"], [good, bad, WISH])
    parsed = json.loads(results[0].answers[0].text)
    assert set(parsed) == {"a"} and results[0].answers[0].finish_reason == "stop"
    failed = results[1].answers[0]
    assert failed.finish_reason == "grammar_error" and failed.error and not failed.tokens
    assert results[2] == llm.generate("abcd", WISH)[0]


@pytest.mark.parametrize(
    "prompts, wish, message",
    [
        ([[]], WISH, "empty prompt"),
        ([[5, 300]], WISH, "token id 300"),
        ([[5] * 97], WISH, "max_model_len"),
        ("a", SamplingParams(logprobs=99), "logprobs asked"),
        ("a", [WISH, WISH], "2 sampling params for 1 prompts"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    llm: LLM, prompts: object, wish: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, wish)  # type: ignore[call-overload]
    assert not llm.engine.unfinished


def test_text_needs_a_tokenizer(device: Device) -> None:
    bare = LLM(device.params, device.model, device.config, buckets=BUCKETS)
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate("text")
    with pytest.raises(ValueError, match="give the LLM a tokenizer"):
        bare.generate([[5]], SamplingParams(stop="x"))
