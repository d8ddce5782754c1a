"""Bad requests beside good ones: a typed error for each at once, the good ones as if alone."""

import math

import numpy as np
import pytest
from engines import make_engine, random_prompt, shared_engine, text_engine
from tiny_models import tiny_model

import inferjax as ij
from inferjax.errors import (
    EngineFull,
    InferjaxError,
    InvalidInput,
    InvalidSampling,
    RequestTooLong,
    ShapeError,
    UnsupportedConfig,
)

GOOD = ij.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BAD_PROMPTS = [
    ([], InvalidInput),
    ("text without a tokenizer", InvalidInput),
    ([[1, 2], [3, 4]], InvalidInput),
    ([1, -5], InvalidInput),
    ([1, 320], InvalidInput),
    ([1.5, 2.0], ShapeError),
    ([2**40], InvalidInput),
    (random_prompt(96), RequestTooLong),
    (None, ShapeError),
    ([{"role": "user", "content": "hi"}], InvalidInput),
]
BAD_SETTINGS = [
    ({"n": 65}, InvalidSampling),
    ({"logprobs": 4}, InvalidSampling),
    ({"prompt_logprobs": 10**6}, InvalidSampling),
    ({"max_tokens": 10**9}, RequestTooLong),
    ({"min_tokens": 200}, RequestTooLong),
    ({"forced_token_ids": [5] * 200}, RequestTooLong),
    ({"forced_token_ids": [320]}, InvalidSampling),
    ({"stop_token_ids": [10**6]}, InvalidSampling),
    ({"stop_token_ids": list(range(5))}, InvalidSampling),
    ({"logit_bias": {i: 1.0 for i in range(9)}}, InvalidSampling),
    ({"stop": ["text"]}, InvalidSampling),
    ({"bad_words": ["text"]}, InvalidSampling),
    ({"echo": True}, InvalidSampling),
]


@pytest.mark.parametrize(("prompt", "kind"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_at_once(prompt, kind):
    engine = shared_engine()
    with pytest.raises(kind) as caught:
        engine.submit(prompt, GOOD)
    assert caught.value.why
    assert not engine.has_work


@pytest.mark.parametrize(("fields", "kind"), BAD_SETTINGS)
def test_bad_settings_are_refused_at_once(fields, kind):
    settings = ij.SamplingParams(**{"temperature": 0.5, **fields})
    with pytest.raises(kind):
        shared_engine().submit(random_prompt(5), settings)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "hot", None])
def test_a_bad_value_never_becomes_a_request(value):
    with pytest.raises(InvalidSampling):
        ij.SamplingParams(temperature=value)


def test_bad_prompts_in_a_list_leave_the_others_alone():
    engine, good = shared_engine(), random_prompt(9)
    (alone,) = engine.generate([good], GOOD)
    mixed = [good, [], good, random_prompt(200), [1, 999]]
    done = engine.generate(mixed, GOOD)
    assert [type(c.error) for c in done] == [
        type(None), InvalidInput, type(None), RequestTooLong, InvalidInput,
    ]  # fmt: skip
    assert [c.finish_reason for c in done] == ["length", "error", "length", "error", "error"]
    assert done[0].token_ids == done[2].token_ids == alone.token_ids


def test_weights_that_give_no_numbers_fail_each_request_and_not_the_engine():
    engine = make_engine()
    good = engine._core.programs.params
    (alone,) = engine.generate([random_prompt(9)], GOOD)
    engine.update_params(good.replace(embed=good.embed * np.nan))
    failed = engine.generate([random_prompt(9), random_prompt(20)], GOOD)
    assert [type(c.error).__name__ for c in failed] == ["NonFiniteLogits"] * 2
    engine.update_params(good)
    (again,) = engine.generate([random_prompt(9)], GOOD)
    assert again.token_ids == alone.token_ids


def test_the_pool_limits_what_can_be_asked_for():
    engine = make_engine(num_pages=5, max_len=None)
    assert engine.max_len == 33
    with pytest.raises(RequestTooLong, match="33 tokens in this engine"):
        engine.submit(random_prompt(34), GOOD)
    (done,) = engine.generate(
        [random_prompt(10)], ij.SamplingParams(temperature=0.0, ignore_eos=True)
    )
    assert len(done.token_ids) == 23


def test_a_full_engine_refuses_and_accepts_again():
    engine = make_engine(max_waiting=2)
    names = [engine.submit(random_prompt(5), GOOD) for _ in range(2)]
    with pytest.raises(EngineFull, match="2 requests"):
        engine.submit(random_prompt(5), GOOD)
    for name in names:
        engine.abort(name)
    assert len(engine.generate([random_prompt(5)] * 7, GOOD)) == 7


def test_ids_are_unique_and_labels_checked():
    engine = make_engine()
    engine.submit(random_prompt(5), GOOD, request_id="mine")
    with pytest.raises(InvalidInput, match="in use"):
        engine.submit(random_prompt(5), GOOD, request_id="mine")
    for labels in ({"priority": 1.5}, {"priority": True}, {"cache_salt": 3}, {"request_id": 7}):
        with pytest.raises(InvalidInput):
            engine.submit(random_prompt(5), GOOD, **labels)


@pytest.mark.parametrize(
    "arguments", [("one text",), ([[1]], [GOOD, GOOD]), ([[1]], "hot"), (7,), ([[1]], None)]
)
def test_generate_refuses_what_is_no_list(arguments):
    with pytest.raises(InferjaxError):
        shared_engine().generate(*arguments)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_running": 0},
        {"max_running": True},
        {"token_budget": "many"},
        {"max_len": -1},
        {"eviction": "random"},
        {"decode_buckets": (4, 2)},
        {"prefill_buckets": [1, 2]},
        {"num_pages": 9, "cache_bytes": 10**6},
        {"overlap": 1},
        {"seed": -1},
        {"widths": None},
    ],
)
def test_a_bad_deployment_is_refused(fields):
    with pytest.raises(UnsupportedConfig):
        ij.EngineConfig(**fields)


def test_an_interrupt_leaves_the_engine_usable():
    engine = shared_engine()
    prompts = [random_prompt(9, seed=i) for i in range(6)]
    whole = engine.generate(prompts, GOOD)
    seen = []

    def interrupt(index: int, completion: ij.Completion) -> None:
        seen.append((index, completion.token_ids))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, GOOD, on_completion=interrupt)
    assert engine.stats().running == engine.stats().waiting == 0
    assert all(ids == whole[index].token_ids for index, ids in seen)
    again = engine.generate(prompts, GOOD)
    assert [c.token_ids for c in again] == [c.token_ids for c in whole]


def test_odd_texts_are_prompts_like_others():
    engine = text_engine()
    done = engine.generate([" ", "\0", "é🎉", "\n\n"], GOOD)
    assert [c.error for c in done] == [None] * 4
    (empty,) = engine.generate([""], GOOD)
    assert isinstance(empty.error, InvalidInput) or empty.usage.prompt_tokens == 1


@pytest.mark.parametrize("wrong", [None, {}, [1.0], "swapped"])
def test_weights_of_another_model_are_refused(wrong):
    engine = shared_engine()
    params = tiny_model("llama").params
    wrong = params.replace(embed=params.embed[:-1]) if wrong == "swapped" else wrong
    with pytest.raises(ShapeError, match="weights"):
        engine.update_params(wrong)
    assert engine.generate([[5, 6]], GOOD)[0].error is None
