"""What `generate` accepts as sampling and randomness; nothing given is ignored."""

import jax
import numpy as np
import pytest

import inferjax as ij
from inferjax.errors import InvalidInput, InvalidSampling, RequestTooLong, ShapeError
from tests.tiny_models import tiny_model

PROMPT = np.arange(10, dtype=np.int32).reshape(2, 5)


def run(**kwargs):
    model = tiny_model("llama")
    return ij.generate(model.params, model.config, PROMPT, max_new_tokens=3, **kwargs)


def test_generate_with_a_seed_equals_generate_with_its_key():
    by_seed = run(sampling=ij.SamplingParams(seed=7))
    keys = jax.numpy.stack([jax.random.key(7)] * 2)
    by_key = run(sampling=ij.SamplingParams(), key=keys)
    np.testing.assert_array_equal(np.asarray(by_seed.tokens), np.asarray(by_key.tokens))
    assert (np.asarray(by_seed.tokens) != np.asarray(run().tokens)).any()


def test_generate_greedy_needs_no_key_however_it_is_asked_for():
    want = np.asarray(run().tokens)
    for sampling in (ij.SamplingParams(temperature=0.0), ij.make_sampling(2, temperature=0.0)):
        np.testing.assert_array_equal(np.asarray(run(sampling=sampling).tokens), want)


def test_generate_stops_at_the_models_end_unless_told_to_go_on():
    model = tiny_model("llama")
    eos = model.config.eos_ids[0]
    bias = {"bias_ids": [eos], "bias": [1e4]}
    ended = run(sampling=ij.make_sampling(2, temperature=0.0, **bias))
    went_on = run(sampling=ij.make_sampling(2, temperature=0.0, ignore_eos=True, **bias))
    assert np.asarray(ended.lengths).tolist() == [1, 1]
    assert np.asarray(went_on.lengths).tolist() == [3, 3]


def test_generate_counts_the_longest_prompt_not_its_padding():
    model = tiny_model("llama")
    room = model.config.max_context
    padded = np.zeros((1, room), np.int32)
    result = ij.generate(model.params, model.config, padded, [5], max_new_tokens=3)
    assert np.asarray(result.status).tolist() == [0]


@pytest.mark.parametrize(
    ("kwargs", "kind", "named"),
    [
        ({"sampling": ij.SamplingParams()}, InvalidSampling, "without a key"),
        ({"sampling": ij.make_sampling(2)}, InvalidSampling, "without a key"),
        ({"sampling": ij.make_sampling(3, temperature=0.0)}, ShapeError, r"\[3\] rows"),
        (
            {"sampling": ij.SamplingParams(n=2), "key": jax.random.key(0)},
            InvalidSampling,
            "num_sam",
        ),
        ({"sampling": ij.SamplingParams(temperature=0, stop="x")}, InvalidSampling, "stop strings"),
        ({"sampling": ij.SamplingParams(temperature=0, bad_words="x")}, InvalidSampling, "text"),
        ({"sampling": ij.SamplingParams(temperature=0, logprobs=4)}, InvalidSampling, "logprobs=4"),
        ({"sampling": ij.SamplingParams(temperature=0, echo=True)}, InvalidSampling, "echo"),
        (
            {"sampling": ij.SamplingParams(temperature=0, include_stop=True)},
            InvalidSampling,
            "include_stop",
        ),
        (
            {"sampling": ij.SamplingParams(temperature=0, skip_special_tokens=False)},
            InvalidSampling,
            "skip_special_tokens",
        ),
        (
            {"sampling": ij.SamplingParams(temperature=0, prompt_logprobs=0)},
            InvalidSampling,
            "prompt_logprobs=0",
        ),
        (
            {"sampling": ij.SamplingParams(temperature=0, forced_token_ids=[1 << 20])},
            InvalidSampling,
            "forced_token_ids contains",
        ),
        (
            {"sampling": ij.SamplingParams(seed=1), "key": jax.random.key(0)},
            InvalidSampling,
            "both",
        ),
        ({"key": jax.random.split(jax.random.key(0), 3)}, ShapeError, r"\[3\]"),
        ({"key": 0, "sampling": ij.SamplingParams()}, InvalidSampling, "key is int 0"),
        ({"num_samples": 0}, InvalidInput, "num_samples=0"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_generate_refuses_what_it_would_have_to_ignore(kwargs, kind, named):
    with pytest.raises(kind, match=named):
        run(**kwargs)


def test_generate_beyond_the_context_names_both_numbers():
    model = tiny_model("llama")
    with pytest.raises(RequestTooLong, match=r"305 tokens[\s\S]*256"):
        ij.generate(model.params, model.config, PROMPT, max_new_tokens=300)


def test_generate_reports_the_most_likely_tokens():
    result = run(exec=ij.Exec(top_logprobs=3))
    np.testing.assert_array_equal(np.asarray(result.top_ids[:, :, 0]), np.asarray(result.tokens))
    np.testing.assert_allclose(
        np.asarray(result.top_logprobs[:, :, 0]), np.asarray(result.logprobs), atol=1e-6
    )
    assert result.top_ids.shape == (2, 3, 3)
