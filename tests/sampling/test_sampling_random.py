"""What sampling draws: frequencies, seeds, truncated candidates, vmap and scan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_sampler import Row, distribution, draw
from sampler_rows import jit_sample, to_arrays, uniform_of
from scipy.stats import chisquare

from inferjax.sampling import (
    SamplingParams,
    make_sampling,
    make_state,
    sample,
    sampling_arrays,
    token_logprobs,
)
from inferjax.sampling.blocks import block_argmax, block_cumsum, invert_cdf
from inferjax.sampling.draw import uniforms

V = 300
BATCH = 32
NUM_BATCHES = 96
LIKELY = 30
jit_scores = jax.jit(token_logprobs)
LOGITS = np.full(V, -40, np.float32)
LOGITS[:LIKELY] = np.random.default_rng(4).normal(size=LIKELY) * 1.5


@pytest.mark.parametrize(
    "case",
    [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20}],
    ids=str,
)
def test_drawn_frequencies_fit_the_distribution(case):
    row = Row(logits=LOGITS, **case)
    ids, probabilities = distribution(row)
    tokens = []
    for position in range(NUM_BATCHES):
        arrays = to_arrays([row] * BATCH, key=jax.random.key(11), positions=position)
        tokens.append(np.asarray(jit_sample(*arrays, candidates=8).tokens))
    counts = np.bincount(np.concatenate(tokens), minlength=V)[ids]
    num_draws = NUM_BATCHES * BATCH
    assert counts.sum() == num_draws
    expected = probabilities * num_draws
    common = expected >= 5
    observed = np.array([*counts[common], counts[~common].sum()])
    wanted = np.array([*expected[common], expected[~common].sum()])
    kept = wanted > 0.5
    wanted = wanted[kept] * observed[kept].sum() / wanted[kept].sum()
    assert chisquare(observed[kept], wanted).pvalue > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        {"top_k": 5},
        {"top_k": 50},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_p": 0.9999},
        {"min_p": 0.3},
        {"min_p": 0.001},
        {"min_p": 0.01, "top_p": 0.8},
        {"top_k": 60, "top_p": 0.8},
        {"top_k": 60, "min_p": 0.2, "top_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_truncated_candidates_draw_what_the_whole_row_does(case, spread):
    logits = np.random.default_rng(7).normal(size=(BATCH, V)) * spread
    rows = [Row(logits=row, **case) for row in logits.round(2)]
    arrays = to_arrays(rows)
    few = jit_sample(*arrays, candidates=8)
    whole = jit_sample(*arrays, candidates=V)
    for index, row in enumerate(rows):
        token, margin = draw(row, uniform_of(arrays[2], index))
        if margin > 1e-5:
            assert few.tokens[index] == whole.tokens[index] == token
    np.testing.assert_allclose(few.sampled_logprobs, whole.sampled_logprobs, atol=1e-4)


@pytest.mark.parametrize("candidates", [8, V])
def test_top_k_of_one_is_greedy_also_among_ties(candidates):
    tied = np.zeros(V, np.float32)
    tied[7:9] = 2.0
    level = np.zeros(V, np.float32)
    level[0] = -0.0
    rows = [Row(logits=logits, top_k=1) for logits in (tied, level)] * (BATCH // 2)
    tokens = jit_sample(*to_arrays(rows), candidates=candidates).tokens
    assert tokens.tolist() == [7, 0] * (BATCH // 2)


def test_a_token_depends_on_seed_sample_index_and_position_but_not_on_the_slot():
    logits, sampling, state = to_arrays([Row(logits=np.zeros(V))] * BATCH)
    seed = jax.random.key_data(jax.random.key(3))
    same = jax.random.wrap_key_data(jnp.tile(seed[None], (BATCH, 1)))
    still = dataclasses.replace(state, key=same, position=jnp.full(BATCH, 5, jnp.int32))

    def run(**changes):
        changed = dataclasses.replace(still, **changes)
        return jit_sample(logits, sampling, changed, candidates=8).tokens.tolist()

    assert len(set(run())) == 1
    assert len(set(run(key=state.key))) > 20
    assert len(set(run(sample_index=jnp.arange(BATCH)))) > 20
    assert len(set(run(position=jnp.arange(BATCH)))) > 20


def test_logprobs_are_bitwise_those_of_scoring_in_any_batch():
    logits, sampling, state = to_arrays([Row(logits=LOGITS + i, top_k=5) for i in range(BATCH)])
    result = jit_sample(logits, sampling, state, candidates=8)
    for count in (1, 3, BATCH):
        scored = jit_scores(logits[None, :count], result.tokens[None, :count])[0]
        np.testing.assert_array_equal(scored, result.logprobs[:count])


def test_raw_keys_draw_what_typed_keys_do():
    keys = jax.random.split(jax.random.key(3), 4)
    typed, raw = make_state(keys, 5), make_state(jax.random.key_data(keys), 5)
    np.testing.assert_array_equal(uniforms(typed), uniforms(raw))


def test_keys_of_other_generators_do_not_make_a_row_depend_on_its_slot():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 4)
    drawn, turned = uniforms(make_state(keys, 5)), uniforms(make_state(keys[::-1], 5))
    assert drawn[::-1].tolist() == turned.tolist()
    assert len(set(drawn.tolist())) == 4


def test_vmap_over_logits_keys_and_temperatures_gives_the_same_tokens():
    batch, copies = 4, 3
    logits = jax.random.normal(jax.random.key(0), (copies, batch, V))
    keys = jax.random.split(jax.random.key(1), (copies, batch))
    temperatures = jnp.array([0.0, 0.7, 1.3])

    def run(logits, key, temperature):
        sampling = make_sampling(
            batch, temperature=temperature, top_k=jnp.array([0, 2, 25, 0]), repetition_penalty=1.3
        )
        history = jnp.broadcast_to(jnp.arange(6), (batch, 6))
        state = make_state(key, 6, history=history, history_len=6, prompt_len=2)
        result = sample(logits, sampling, state, candidates=8, top_logprobs=1)
        return result.tokens, result.logprobs

    tokens, logprobs = jax.jit(jax.vmap(run))(logits, keys, temperatures)
    alone = [jax.jit(run)(*args) for args in zip(logits, keys, temperatures, strict=True)]
    np.testing.assert_array_equal(tokens, np.stack([token for token, _ in alone]))
    np.testing.assert_allclose(logprobs, np.stack([value for _, value in alone]), atol=1e-6)


def test_sample_runs_inside_scan_with_a_growing_history():
    state = make_state(
        jax.random.split(jax.random.key(0), 2), 0, history=jnp.full((2, 12), -1, jnp.int32)
    )
    sampling = make_sampling(2, temperature=0.0, frequency_penalty=2.0)
    logits = jnp.asarray(np.tile(np.linspace(1, 0, V, dtype=np.float32), (2, 1)))

    def step(state, _):
        tokens = sample(logits, sampling, state).tokens
        history = state.history.at[jnp.arange(2), state.history_len].set(tokens)
        return dataclasses.replace(
            state,
            history=history,
            history_len=state.history_len + 1,
            position=state.position + 1,
        ), tokens

    _, tokens = jax.jit(lambda state: jax.lax.scan(step, state, None, length=12))(state)
    assert tokens[:, 0].tolist() == list(range(12))


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.4, 1.0, 5.0]),
    st.integers(-1, 12) | st.just(V) | st.just(V + 2),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([1.0, 1.4, 0.6]),
    st.sampled_from([0.0, 0.8]),
    st.booleans(),
)
def test_any_settings_draw_what_the_reference_does(
    seed, temperature, top_k, top_p, min_p, repetition, frequency, ties
):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(BATCH):
        logits = generator.normal(size=V) * 2
        logits = logits.round(0) if ties else logits
        history = generator.integers(0, V, 8).tolist()
        rows.append(
            Row(
                logits=logits.astype(np.float32),
                history=history,
                prompt_len=4,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
            )
        )
    logits, sampling, state = to_arrays(rows, key=jax.random.key(seed))
    result = jit_sample(logits, sampling, state, candidates=8)
    for index, row in enumerate(rows):
        if row.top_p == 0.5 and ties:
            continue
        token, margin = draw(row, uniform_of(state, index))
        assert result.tokens[index] == token or (margin < 1e-5 and temperature > 0)


BASE = {"temperature": 0.8, "seed": 0}
EFFECTS = {
    "temperature": {"temperature": 5.0},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 20.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": {12: 50.0}},
    "allowed_token_ids": {"allowed_token_ids": (17,)},
    "bad_token_ids": {"bad_token_ids": (2, (1, 5))},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(9))},
}


def test_every_field_that_becomes_arrays_changes_what_is_drawn():
    not_drawn = {"stop", "bad_words", "stop_token_ids", "ignore_eos", "seed", "n", "logprobs"}
    not_drawn |= {"logprob_token_ids", "prompt_logprobs", "forced_token_ids"}
    not_drawn |= {"echo", "include_stop", "skip_special_tokens"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(EFFECTS) == fields - not_drawn - {"max_tokens"}
    rows = [{**BASE, **change} for change in ({}, *EFFECTS.values())]
    copies = 24
    params = [SamplingParams(**row) for row in rows for _ in range(copies)]
    sampling = sampling_arrays(params, vocab_size=V, eos_ids=[0])
    batch = len(params)
    history = jnp.tile(jnp.array([[2, 5, 5, 5, 1]], jnp.int32), (batch, 1))
    keys = jnp.tile(jax.random.key_data(jax.random.split(jax.random.key(0), copies)), (12, 1))
    state = make_state(keys, 5, history=history, history_len=5, prompt_len=1)
    logits = jnp.zeros((batch, V)).at[:, :9].set(5.5)
    tokens = np.asarray(jit_sample(logits, sampling, state).tokens).reshape(len(rows), copies)
    for name, drawn in zip(EFFECTS, tokens[1:], strict=True):
        assert drawn.tolist() != tokens[0].tolist(), name


@pytest.mark.parametrize("size", [1, 7, 256, 257, 1000])
def test_blocks_compute_what_whole_rows_do(size):
    values = np.random.default_rng(size).integers(0, 50, (3, size)).astype(np.float32)
    np.testing.assert_array_equal(block_argmax(jnp.asarray(values)), values.argmax(1))
    np.testing.assert_array_equal(block_cumsum(jnp.asarray(values)), values.cumsum(1))


@pytest.mark.parametrize("size", [5, 256, 1000])
@pytest.mark.parametrize("uniform", [0.0, 0.25, 1 - 2**-24])
def test_invert_cdf_never_returns_an_index_of_weight_zero(size, uniform):
    weights = np.zeros((4, size), np.float32)
    weights[0, size // 2] = 1e-30
    weights[1, 1::2] = 0.1
    weights[2, [1, size - 2]] = 1e-7, 1.0
    weights[3, :3] = 1.0
    index, total = invert_cdf(jnp.asarray(weights), jnp.full(4, uniform, jnp.float32))
    assert (weights[np.arange(4), np.asarray(index)] > 0).all()
    np.testing.assert_allclose(total, weights.sum(1), rtol=1e-6)
    running = weights.astype(np.float64).cumsum(1)
    expected = (running > uniform * running[:, -1:]).argmax(1)
    assert index[0] == expected[0]
    assert index[3] == expected[3]
