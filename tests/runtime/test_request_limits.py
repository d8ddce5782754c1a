"""Requests at the edges of what may be drawn and reported, through `generate` and `stream`."""

import numpy as np
from tiny_models import tiny_model

import inferjax as ij

PROMPT = [5, 9, 33, 12]
NOTHING = ij.SamplingParams(temperature=0.0, max_tokens=0)


def test_generate_of_no_tokens_draws_none():
    model = tiny_model("llama")
    result = ij.generate(model.params, model.config, [PROMPT], max_new_tokens=2, sampling=NOTHING)
    np.testing.assert_array_equal(result.lengths, [0])
    np.testing.assert_array_equal(result.logprobs, [[0.0, 0.0]])
    np.testing.assert_array_equal(result.status, [0])


def test_stream_of_no_tokens_ends_at_once():
    (event,) = ij.stream(tiny_model("llama"), PROMPT, NOTHING)
    assert (event.token_ids, event.finish_reason) == ([], "length")


def test_stream_reports_the_top_tokens_that_the_request_asks_for():
    request = ij.SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    (event,) = ij.stream(tiny_model("llama"), PROMPT, request)
    assert len(event.top_ids[0]) == 3
    assert event.top_ids[0][0] == event.token_ids[0]
    assert event.top_logprobs[0][0] == event.logprobs[0]
