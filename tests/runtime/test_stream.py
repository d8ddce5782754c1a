"""The host loop gives what `generate` gives, also when its cache has to grow."""

import numpy as np
import pytest

import inferjax as ij
from inferjax import generation
from inferjax.errors import InvalidInput, InvalidSampling, RequestTooLong
from tests.tiny_models import tiny_model

PROMPT = [5, 9, 11, 40, 7]


def streamed(sampling, **kwargs):
    events = list(ij.stream(tiny_model("llama"), PROMPT, sampling, **kwargs))
    return [t for e in events for t in e.token_ids], [x for e in events for x in e.logprobs], events


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_equals_generate(temperature):
    model = tiny_model("llama")
    params = ij.SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    tokens, logprobs, events = streamed(params)
    whole = ij.generate(model.params, model.config, [PROMPT], max_new_tokens=20, sampling=params)
    assert tokens == np.asarray(whole.tokens)[0].tolist()
    np.testing.assert_allclose(logprobs, np.asarray(whole.logprobs)[0], atol=2e-5)
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_stream_grows_its_cache_without_changing_the_reply(monkeypatch, kv_dtype):
    params = ij.SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, repetition_penalty=1.3
    )
    want = streamed(params, exec=ij.Exec(kv_dtype=kv_dtype))[0]
    monkeypatch.setattr(generation, "FIRST_ROOM", 8)
    monkeypatch.setattr(generation, "SMALLEST_CAPACITY", 16)
    assert streamed(params, exec=ij.Exec(page_size=8, kv_dtype=kv_dtype))[0] == want


def test_stream_without_a_limit_ends_at_the_context():
    tokens, _, events = streamed(ij.SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(tokens) == tiny_model("llama").config.max_context - len(PROMPT)
    assert events[-1].finish_reason == "length"


def test_stream_reports_a_stop_id():
    first = streamed(ij.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    tokens, _, events = streamed(ij.SamplingParams(temperature=0.0, stop_token_ids=first[2:3]))
    assert tokens[-1] == first[2]
    assert events[-1].finish_reason == "stop"


def test_stream_refuses_what_it_cannot_do():
    model = tiny_model("llama")
    with pytest.raises(InvalidInput, match="empty prompt"):
        ij.stream(model, [])
    with pytest.raises(InvalidInput, match="token id 999"):
        ij.stream(model, [1, 999])
    with pytest.raises(RequestTooLong, match="261"):
        ij.stream(model, PROMPT, ij.SamplingParams(max_tokens=256))
    with pytest.raises(InvalidSampling, match="n=2"):
        ij.stream(model, PROMPT, ij.SamplingParams(n=2))
    with pytest.raises(InvalidSampling, match="echo=True"):
        ij.stream(model, PROMPT, ij.SamplingParams(echo=True))
    with pytest.raises(InvalidSampling, match="prompt_logprobs=2"):
        ij.stream(model, PROMPT, ij.SamplingParams(prompt_logprobs=2))
    with pytest.raises(InvalidSampling, match="tokenizer"):
        ij.stream(model, PROMPT, ij.SamplingParams(bad_words="no"))
