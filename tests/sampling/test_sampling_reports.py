"""Forced tokens and what rows ask to be told, against the NumPy reference; fixed widths."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from numpy_sampler import Row, distribution, raw_logprobs
from sampler_rows import jit_sample, to_arrays

from inferjax.errors import InvalidSampling, UnsupportedConfig
from inferjax.sampling import (
    SamplingParams,
    Status,
    Widths,
    check_request,
    sampling_arrays,
    sampling_rows,
)

V = 40
BATCH = 8
LOGITS = np.random.default_rng(1).normal(size=(BATCH, V)).astype(np.float32) * 2
TIES = np.repeat(np.arange(8, 0, -1), 5).astype(np.float32)
HISTORY = [3, 5, 3, 7]
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.7},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p beyond the candidates": {"min_p": 0.0005, "top_p": 0.97},
    "ties at the k boundary": {"logits": TIES, "top_k": 7},
    "penalties and a ban": {"repetition_penalty": 1.7, "bad_words": ((7, 4),), "bias": {4: 9.0}},
    "only allowed": {"allowed": (2, 19, 30), "top_k": 2},
}


def make_rows(tokens, case):
    base = {"history": HISTORY, "prompt_len": 2}
    rows = [Row(**{"logits": logits, **base, **case}) for logits in LOGITS]
    return [
        dataclasses.replace(row, forced=() if token is None else (token, 1))
        for row, token in zip(rows, tokens, strict=True)
    ]


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS.keys())
def test_forced_token_has_the_probability_it_would_have_been_drawn_with(case):
    for start in range(0, V, BATCH):
        rows = make_rows(range(start, start + BATCH), case)
        result = jit_sample(*to_arrays(rows), candidates=8)
        assert result.tokens.tolist() == list(range(start, start + BATCH))
        assert not result.status.any()
        for index, row in enumerate(rows):
            token = start + index
            ids, probabilities = distribution(row)
            chances = dict(zip(ids.tolist(), probabilities, strict=True))
            with np.errstate(divide="ignore"):
                expected = np.log(chances.get(token, 0.0))
            np.testing.assert_allclose(result.sampled_logprobs[index], expected, atol=2e-5)
            np.testing.assert_allclose(
                result.logprobs[index], raw_logprobs(row)[token], rtol=1e-5, atol=2e-5
            )


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS.keys())
def test_forced_neighbours_leave_a_row_as_it_is(case):
    free = jit_sample(*to_arrays(make_rows([None] * BATCH, case)), candidates=8)
    tokens = [None if i % 2 else 11 for i in range(BATCH)]
    mixed = jit_sample(*to_arrays(make_rows(tokens, case)), candidates=8)
    for a, b in zip(jax.tree.leaves(free), jax.tree.leaves(mixed), strict=True):
        np.testing.assert_array_equal(a[1::2], b[1::2])
    assert mixed.tokens[::2].tolist() == [11] * (BATCH // 2)


def test_forcing_ends_with_the_forced_ids():
    logits, sampling, state = to_arrays(make_rows([9] * BATCH, {"temperature": 0.0}))
    ended = dataclasses.replace(state, history_len=state.forced_len)
    tokens = jit_sample(logits, sampling, ended, candidates=8).tokens
    assert tokens.tolist() == LOGITS.argmax(1).tolist()


def test_forced_id_outside_the_vocabulary_is_reported_and_not_taken():
    result = jit_sample(*to_arrays(make_rows([V, None] * 4, {"temperature": 0.0})), candidates=8)
    assert result.status.tolist() == [int(Status.BAD_TOKEN), 0] * 4
    assert result.tokens.tolist() == LOGITS.argmax(1).tolist()


def test_chosen_logprobs_are_those_of_the_ids_a_row_names():
    ids = [(3, 1, 39), (), (7,), (0, 0), (), (38,), (5, 6, 7, 8), ()]
    rows = [
        Row(logits=logits, history=HISTORY, prompt_len=2, top_k=3, logprob_ids=named)
        for logits, named in zip(LOGITS, ids, strict=True)
    ]
    result = jit_sample(*to_arrays(rows), candidates=8)
    for index, row in enumerate(rows):
        expected = np.zeros(4)
        expected[: len(ids[index])] = raw_logprobs(row)[list(ids[index])]
        np.testing.assert_allclose(result.chosen_logprobs[index], expected, rtol=1e-5, atol=2e-5)


def test_chosen_logprob_of_the_drawn_id_is_its_logprob():
    rows = [Row(logits=logits, logprob_ids=(1, 2)) for logits in LOGITS]
    logits, sampling, state = to_arrays(rows)
    drawn = jit_sample(logits, sampling, state, candidates=8)
    ids = sampling.logprob_ids.at[:, 1].set(drawn.tokens)
    again = jit_sample(logits, dataclasses.replace(sampling, logprob_ids=ids), state, candidates=8)
    np.testing.assert_array_equal(again.chosen_logprobs[:, 1], drawn.logprobs)


def test_chosen_id_outside_the_vocabulary_sets_the_status_of_its_row_alone():
    rows = [
        Row(logits=logits, logprob_ids=(V,) if i == 2 else (1,)) for i, logits in enumerate(LOGITS)
    ]
    result = jit_sample(*to_arrays(rows), candidates=8)
    assert result.status.tolist() == [0, 0, int(Status.BAD_SAMPLING), 0, 0, 0, 0, 0]
    assert result.chosen_logprobs[2].tolist() == [0.0] * 4


def test_rows_report_as_many_top_tokens_as_they_ask_for():
    rows = [Row(logits=logits, num_top=i) for i, logits in enumerate(LOGITS)]
    result = jit_sample(*to_arrays(rows), candidates=8, top_logprobs=4)
    for index, row in enumerate(rows):
        count = min(index, 4)
        best = np.argsort(-row.logits, kind="stable")[:count]
        assert result.top_ids[index].tolist() == [*best, *[-1] * (4 - count)]
        np.testing.assert_allclose(
            result.top_logprobs[index],
            [*raw_logprobs(row)[best], *[0.0] * (4 - count)],
            rtol=1e-5,
            atol=2e-5,
        )


WIDTHS = Widths(stop_ids=2, bias=3, allowed=4, bad_words=2, bad_word_len=2, logprob_ids=1)
FULL = SamplingParams(
    stop_token_ids=[1, 2],
    logit_bias={1: 1.0, 2: 2.0, 3: 3.0},
    allowed_token_ids=[1, 2, 3, 4],
    bad_token_ids=[1, [2, 3]],
    logprob_token_ids=[5],
    logprobs=1,
)


def test_widths_give_every_batch_the_same_shapes():
    kinds = [
        jax.tree.map(lambda x: (x.shape, x.dtype), sampling_rows(rows, vocab_size=9, widths=WIDTHS))
        for rows in ([FULL, SamplingParams()], [SamplingParams(temperature=0.0)] * 2)
    ]
    assert kinds[0] == kinds[1]
    rows = sampling_rows([FULL], vocab_size=9, widths=WIDTHS)
    assert rows.stop_ids.shape == (1, 2)
    assert rows.bias_ids.shape == rows.bias.shape == (1, 3)
    assert rows.allowed_ids.shape == (1, 4)
    assert rows.bad_words.tolist() == [[[-1, 1], [2, 3]]]
    assert rows.logprob_ids.tolist() == [[5]]


def test_rows_are_numpy_and_equal_to_arrays():
    rows = sampling_rows([FULL, SamplingParams()], vocab_size=9, eos_ids=(8,))
    arrays = sampling_arrays([FULL, SamplingParams()], vocab_size=9, eos_ids=(8,))
    for a, b in zip(jax.tree.leaves(rows), jax.tree.leaves(arrays), strict=True):
        assert isinstance(a, np.ndarray)
        assert isinstance(b, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("fields", "named", "limit"),
    [
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids has length 3", "limit is 2"),
        ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "logit_bias has length 4", "limit is 3"),
        ({"allowed_token_ids": range(5)}, "allowed_token_ids has length 5", "limit is 4"),
        ({"bad_token_ids": [1, 2, 3]}, "bad_token_ids has length 3", "limit is 2"),
        ({"bad_token_ids": [[1, 2, 3]]}, "a sequence in bad_token_ids has length 3", "limit is 2"),
        ({"logprob_token_ids": [1, 2]}, "logprob_token_ids has length 2", "limit is 1"),
    ],
    ids=str,
)
def test_list_beyond_its_width_is_refused_with_field_length_and_limit(fields, named, limit):
    with pytest.raises(InvalidSampling, match=rf"{named}(.|\n)*{limit}"):
        check_request(SamplingParams(**fields), vocab_size=9, widths=WIDTHS)
    with pytest.raises(InvalidSampling, match=named):
        sampling_rows([SamplingParams(), SamplingParams(**fields)], vocab_size=9, widths=WIDTHS)


def test_request_that_fits_is_not_refused():
    check_request(FULL, vocab_size=9, widths=WIDTHS)


@pytest.mark.parametrize("fields", [{"bias": -1}, {"stop_ids": 1.5}, {"bad_word_len": 0}], ids=str)
def test_width_that_is_none_is_refused(fields):
    with pytest.raises(UnsupportedConfig, match=next(iter(fields))):
        Widths(**fields)


def test_building_rows_takes_a_few_calls_a_row():
    """Counted, not timed: about 0.3 ms for 16 rows, all of it on the way to a dispatch."""
    rows = [SamplingParams(temperature=0.5, logit_bias={1: 2.0}), FULL] * 8
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        own = frame.f_code.co_filename.endswith(("sampling/rows.py", "sampling/widths.py"))
        calls += event == "call" and own

    sys.setprofile(count)
    try:
        sampling_rows(rows, vocab_size=49_152, eos_ids=(2,), widths=Widths())
    finally:
        sys.setprofile(None)
    assert calls < 60 * len(rows)
