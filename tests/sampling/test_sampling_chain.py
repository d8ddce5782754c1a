"""`sample` against the NumPy reference, row by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_sampler import Row, distribution, draw, processed, raw_logprobs
from sampler_rows import jit_sample, to_arrays, uniform_of

from inferjax.errors import InvalidSampling, ShapeError
from inferjax.sampling import (
    Status,
    make_sampling,
    processed_logits,
    sample,
    stopped,
    token_logprobs,
)

V = 40
BATCH = 8
LOGITS = np.random.default_rng(1).normal(size=(BATCH, V)).astype(np.float32) * 2
HISTORY = [3, 5, 3, 7, 9, 5, 5]
jit_processed = jax.jit(processed_logits)
LEVEL = np.zeros(V, np.float32)
STEPS = np.repeat(np.arange(8, 0, -1), 5).astype(np.float32)

CASES = {
    "plain": {},
    "temperature": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "greedy with filters": {"temperature": 0.0, "top_k": 3, "top_p": 0.2},
    "just above greedy": {"temperature": 2e-5},
    "top_k": {"top_k": 3},
    "top_k off": {"top_k": -1},
    "top_k of all": {"top_k": V},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "min_p then top_k then top_p": {"min_p": 0.05, "top_k": 6, "top_p": 0.8, "temperature": 1.7},
    "top_p is of what top_k left": {"top_k": 4, "top_p": 0.7, "temperature": 3.0},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "all penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.2,
    },
    "bias": {"bias": {3: 4.0, 11: -7.0}},
    "bias before the repetition penalty": {"bias": {3: -9.0}, "repetition_penalty": 2.0},
    "allowed": {"allowed": (2, 19, 30)},
    "allowed and top_k": {"allowed": (2, 19, 30), "top_k": 2},
    "token mask": {"token_mask": {1, 31, 32, 39}},
    "bad token": {"bad_words": ((int(LOGITS[0].argmax()),),), "temperature": 0.0},
    "bad word that matches": {"bad_words": ((5, 5, 4), (9, 4)), "bias": {4: 50.0}},
    "bad word that does not": {"bad_words": ((5, 9, 4), (9, 4)), "bias": {4: 50.0}},
    "bad word longer than the context": {
        "history": [5],
        "prompt_len": 1,
        "bad_words": ((5, 5, 4),),
        "bias": {4: 50.0},
    },
    "two bad words, one matches": {"bad_words": ((9, 4), (5, 4)), "bias": {4: 50.0}},
    "min_tokens": {"min_tokens": 5, "eos_ids": (4, 6), "stop_ids": (8,), "bias": {4: 50, 8: 40}},
    "min_tokens reached": {"min_tokens": 4, "eos_ids": (4,), "bias": {4: 50.0}},
    "everything": {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "bias": {1: 1.0},
        "bad_words": ((5, 2),),
        "min_tokens": 9,
        "eos_ids": (0,),
    },
    "level logits": {"logits": LEVEL},
    "ties at the k boundary": {"logits": STEPS, "top_k": 7},
    "ties at the p boundary": {"logits": LEVEL, "top_p": 0.5},
    "ties at the min_p boundary": {"logits": STEPS, "min_p": 1.0},
    "mostly -inf": {"logits": np.where(np.arange(V) % 13 == 5, LOGITS[0], -np.inf)},
    "mostly -inf and top_k": {
        "logits": np.where(np.arange(V) % 13 == 5, LOGITS[0], -np.inf),
        "top_k": 30,
    },
    "huge logits": {"logits": LOGITS[0] * 1e37, "temperature": 0.01},
}


def make_rows(case):
    base = {"history": HISTORY, "prompt_len": 3}
    return [Row(**{"logits": logits, **base, **case}) for logits in LOGITS]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sample_equals_the_reference(case):
    rows = make_rows(case)
    logits, sampling, state = to_arrays(rows)
    result = jit_sample(logits, sampling, state, candidates=16)
    assert not result.status.any()
    sure = 0
    for index, row in enumerate(rows):
        token, margin = draw(row, uniform_of(state, index))
        greedy = row.temperature < 1e-5
        if not greedy and margin < 1e-5:
            continue
        sure += 1
        assert result.tokens[index] == token
        ids, probabilities = distribution(row)
        expected = np.log(probabilities[list(ids).index(token)])
        np.testing.assert_allclose(result.sampled_logprobs[index], expected, atol=2e-5)
        np.testing.assert_allclose(
            result.logprobs[index], raw_logprobs(row)[token], rtol=1e-5, atol=2e-5
        )
    assert sure >= BATCH // 2


@pytest.mark.parametrize("case", ["all penalties", "everything", "bias", "token mask"])
def test_processed_logits_equal_the_reference(case):
    rows = make_rows(CASES[case])
    values = jit_processed(*to_arrays(rows))
    np.testing.assert_allclose(values, np.stack([processed(row) for row in rows]), atol=1e-5)


def test_sample_mixes_all_cases_in_one_batch():
    names = list(CASES) * 2
    for start in range(0, len(CASES), BATCH):
        rows = [make_rows(CASES[name])[0] for name in names[start : start + BATCH]]
        logits, sampling, state = to_arrays(rows)
        result = jit_sample(logits, sampling, state, candidates=16)
        assert not result.status.any()
        for index, row in enumerate(rows):
            token, margin = draw(row, uniform_of(state, index))
            assert result.tokens[index] == token or margin < 1e-5, names[start + index]


def hostile_rows(case):
    """Return a batch whose first row is the case; the others need every branch or are broken."""
    good = make_rows(case)[0]
    nan = dataclasses.replace(good, logits=np.full(V, np.nan, np.float32))
    return [
        good,
        nan,
        dataclasses.replace(good, temperature=np.nan),
        dataclasses.replace(good, allowed=(1,), bad_words=((1,),)),
        make_rows(CASES["everything"])[1],
        Row(logits=LEVEL, top_p=0.99),
        Row(logits=LOGITS[2], temperature=0.0),
        Row(logits=np.full(V, -np.inf, np.float32)),
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_row_is_bitwise_the_same_beside_hostile_neighbours_in_any_slot(case):
    good = make_rows(case)[0]
    calm = [good] * BATCH
    wanted, _ = run_at(calm, 0)
    for slot in (0, 3, 7):
        rows = hostile_rows(case)
        rows[0], rows[slot] = rows[slot], rows[0]
        got, status = run_at(rows, slot)
        assert status == 0
        for a, b in zip(wanted, got, strict=True):
            np.testing.assert_array_equal(a, b)


def run_at(rows, slot):
    """Sample with one key and position for the row of interest, wherever it sits."""
    logits, sampling, state = to_arrays(rows)
    key = jax.random.split(jax.random.key(5), BATCH)
    key = jax.random.wrap_key_data(
        jax.random.key_data(key).at[slot].set(jax.random.key_data(jax.random.key(99)))
    )
    state = dataclasses.replace(state, key=key, position=jnp.full(BATCH, 17, jnp.int32))
    result = jit_sample(logits, sampling, state, candidates=16)
    values = (result.tokens, result.logprobs, result.sampled_logprobs)
    return [np.asarray(value[slot]) for value in values], int(result.status[slot])


def test_broken_rows_report_status_and_a_valid_token():
    rows = hostile_rows({"top_k": 5})
    logits, sampling, state = to_arrays(rows)
    result = jit_sample(logits, sampling, state, candidates=16)
    bad, nan, empty = Status.BAD_SAMPLING, Status.NAN_LOGITS, Status.ALL_MASKED
    assert [Status(int(bits)) for bits in result.status] == [
        Status.OK,
        nan,
        bad,
        empty,
        Status.OK,
        Status.OK,
        Status.OK,
        nan,
    ]
    assert ((result.tokens >= 0) & (result.tokens < V)).all()
    assert result.tokens[2] == result.tokens[3] == LOGITS[0].argmax()


def test_a_single_nan_or_infinity_is_reported_and_never_drawn():
    rows = make_rows({"logits": LOGITS[0], "top_k": 2})
    logits, sampling, state = to_arrays(rows)
    logits = logits.at[0, 4].set(jnp.nan).at[1, 4].set(jnp.inf)
    result = jit_sample(logits, sampling, state, candidates=16)
    assert result.status.tolist() == [int(Status.NAN_LOGITS)] * 2 + [0] * 6
    assert result.tokens[:2].tolist() == [LOGITS[0].argmax()] * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", np.nan),
        ("temperature", -0.5),
        ("temperature", np.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", np.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", np.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", np.nan),
        ("min_tokens", -1),
        ("stop_ids", (V,)),
        ("allowed", (V + 3,)),
        ("bad_words", ((V,),)),
        ("bias", {3: np.nan}),
        ("bias", {-7: 1.0}),
    ],
)
def test_values_out_of_range_set_the_status_of_their_row_alone(field, value):
    rows = make_rows({})
    rows[2] = dataclasses.replace(rows[2], **{field: value})
    logits, sampling, state = to_arrays(rows)
    result = jit_sample(logits, sampling, state, candidates=16)
    assert result.status.tolist() == [0, 0, int(Status.BAD_SAMPLING), 0, 0, 0, 0, 0]
    assert result.tokens[2] == LOGITS[2].argmax()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_padded_vocabulary_is_never_drawn_from_low_precision_logits(settings):
    """Zeros there would win over logits that are all negative; NaN there does no harm."""
    padded = np.zeros((BATCH, 48), np.float32)
    padded[:, :V] = -5 - np.abs(LOGITS)
    padded[:, 47] = np.nan
    padded = padded.astype(jnp.bfloat16)
    rows = [Row(logits=logits, vocab_size=V, **settings) for logits in padded]
    logits, sampling, state = to_arrays(rows)
    logits = logits.astype(jnp.bfloat16)
    result = jit_sample(logits, sampling, state, candidates=16, vocab_size=V, top_logprobs=7)
    assert not result.status.any()
    assert (result.tokens < V).all()
    assert (result.top_ids < V).all()
    expected = [raw_logprobs(row)[token] for row, token in zip(rows, result.tokens, strict=True)]
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)
    assert result.logprobs.dtype == jnp.float32
    again = token_logprobs(logits, result.tokens, vocab_size=V)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(result.logprobs))


def test_penalties_do_not_count_history_padding():
    row = Row(logits=LOGITS[0], history=[3, 5], prompt_len=1, temperature=0.0)
    row = dataclasses.replace(row, repetition_penalty=9.0, frequency_penalty=2.0)
    logits, sampling, state = to_arrays([row] * BATCH)
    values = jit_processed(logits, sampling, state)[0]
    changed = np.flatnonzero(np.asarray(values) != LOGITS[0])
    assert changed.tolist() == [3, 5]
    poisoned = dataclasses.replace(state, history=state.history.at[:, 2:].set(-9))
    np.testing.assert_array_equal(jit_processed(logits, sampling, poisoned)[0], values)


def test_top_logprobs_are_raw_and_ordered():
    padded = np.concatenate([STEPS, np.full(8, 96, np.float32)])
    row = Row(logits=padded, vocab_size=V, temperature=0.2, top_k=1)
    logits, sampling, state = to_arrays([row] * BATCH)
    logits = logits.astype(jnp.bfloat16)
    result = jit_sample(logits, sampling, state, candidates=16, vocab_size=V, top_logprobs=7)
    assert result.top_ids[0].tolist() == list(range(7))
    np.testing.assert_allclose(result.top_logprobs[0], raw_logprobs(row)[:7], atol=1e-5)


def test_token_logprobs_have_any_leading_axes_and_a_gradient():
    logits = jnp.asarray(LOGITS).reshape(2, 4, V)
    tokens = jnp.arange(8).reshape(2, 4)
    expected = np.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], 2)
    np.testing.assert_allclose(token_logprobs(logits, tokens), expected[..., 0], atol=1e-5)
    got = jax.jit(jax.grad(lambda x: token_logprobs(x, tokens).sum()))(logits)
    wanted = jax.nn.one_hot(tokens, V) - jax.nn.softmax(logits, axis=-1)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_shapes_and_static_arguments_are_checked():
    logits, sampling, state = to_arrays(make_rows({}))
    with pytest.raises(ShapeError, match=r"Sampling\.temperature has shape \(8,\)"):
        sample(logits[:3], sampling, state)
    with pytest.raises(InvalidSampling, match="top_logprobs is 41"):
        sample(logits, sampling, state, top_logprobs=41)
    with pytest.raises(InvalidSampling, match="candidates is 0"):
        sample(logits, sampling, state, candidates=0)


def test_stopped_knows_eos_stop_ids_ignore_eos_and_min_tokens():
    sampling = make_sampling(6, eos_ids=[7], stop_ids=[[4, 5]] * 6, min_tokens=[0, 0, 0, 0, 3, 3])
    sampling = dataclasses.replace(sampling, ignore_eos=jnp.array([0, 1, 1, 0, 0, 0], bool))
    tokens = jnp.array([7, 7, 5, 6, 7, 7])
    ended = stopped(tokens, sampling, jnp.array([1, 1, 1, 1, 3, 4]))
    assert ended.tolist() == [True, False, True, False, False, True]
