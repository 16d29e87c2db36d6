"""Every refused wish names its value; containers become tuples; answers get seeds of their own."""

import math

import pytest

from deepinfer_jax.engine.sampling_params import (
    Grammar,
    SamplingLimits,
    SamplingParams,
    check,
    seeds,
)

REFUSED = [
    ({"temperature": -0.5}, "temperature is -0.5"),
    ({"temperature": 1e-7}, "give 0 for greedy"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_k": 0}, "top_k is 0"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"logit_bias": {7: math.inf}}, "logit_bias of token 7"),
    ({"logit_bias": ((7, 1.0), (7, 2.0))}, "names a token twice"),
    ({"seed": 1 << 64}, "seed is 18446744073709551616"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"min_tokens": 17}, "min_tokens is 17"),
    ({"n": 0}, "n is 0"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"stop": ("a", "")}, "empty string"),
    ({"grammar": Grammar("regex", "a+"), "ignore_eos": True}, "ignore_eos"),
    ({"grammar": Grammar("regex", "a+"), "min_tokens": 2}, "min_tokens"),
]


@pytest.mark.parametrize(("wish", "message"), REFUSED)
def test_refused(wish: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wish)


@pytest.mark.parametrize(("kind", "text"), [("xml", "a"), ("regex", "")])
def test_refused_grammar(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match="grammar"):
        Grammar(kind, text)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"logit_bias": {100: 1.0}}, r"logit_bias holds \[100\]"),
        ({"stop_ids": (-1,)}, r"stop_ids holds \[-1\]"),
        ({"logit_bias": dict.fromkeys(range(3), 1.0)}, "3 logit_bias entries"),
        ({"stop_ids": (1, 2)}, "3 stop_ids"),
        ({"logprobs": 5}, "5 logprobs"),
    ],
)
def test_refused_by_the_engine(wish: dict, message: str) -> None:
    limits = SamplingLimits(bias=2, stop_ids=2, logprobs=4)
    with pytest.raises(ValueError, match=message):
        check(SamplingParams(**wish), vocab_size=100, limits=limits)


def test_prompt_logprobs_need_all_prompt_rows() -> None:
    params, limits = SamplingParams(prompt_logprobs=0), SamplingLimits()
    check(params, 100, limits)
    with pytest.raises(ValueError, match="compact"):
        check(params, 100, limits, truncation="compact")


def test_containers_are_tuples() -> None:
    params = SamplingParams(logit_bias={9: 1, 2: -1}, stop="end", stop_ids=[3])  # type: ignore[arg-type]
    assert params.bias == ((2, -1.0), (9, 1.0))
    assert (params.stop, params.stop_ids) == (("end",), (3,))
    hash(params)


def test_answers_have_different_seeds_and_the_first_is_the_request_s() -> None:
    found = seeds(SamplingParams(seed=5, n=4), random_seed=77)
    assert found[0] == 5
    assert len(set(found)) == 4
    assert found == seeds(SamplingParams(seed=5, n=4), random_seed=78)
    assert seeds(SamplingParams(), random_seed=77) == (77,)
