"""Output along given ids, and chosen log-probabilities, through `generate` and `stream`."""

import jax
import numpy as np
import pytest
from tiny_models import padded, prompts_of, tiny_model
from tolerances import TINY_LOGPROBS_F32

import inferjax as ij

LENGTHS, NEW = (3, 9), 6
FORCED = (7, 40, 7, 11)
PLAIN = ij.Exec()

# The same lists everywhere, so that all runs share two programs: forced and free.
LISTS = {"stop_token_ids": [1], "logprob_token_ids": [7, 40, 11]}


def run(exec: ij.Exec = PLAIN, **fields):
    model = tiny_model("llama")
    prompts = prompts_of(model, LENGTHS)
    sampling = ij.SamplingParams(**{"temperature": 0.8, "ignore_eos": True, **LISTS, **fields})
    result = ij.generate(
        model.params,
        model.config,
        padded(prompts, max(LENGTHS)),
        list(LENGTHS),
        key=jax.random.key(1),
        max_new_tokens=NEW,
        sampling=sampling,
        exec=exec,
    )
    assert not np.asarray(result.status).any()
    return jax.tree.map(np.asarray, result)


def scores(result, exec):
    """Return the log-probability that `score` gives each generated token."""
    model = tiny_model("llama")
    whole = [
        np.concatenate([prompt, tokens])
        for prompt, tokens in zip(prompts_of(model, LENGTHS), result.tokens, strict=True)
    ]
    lengths = [len(row) for row in whole]
    values = ij.score(model.params, model.config, padded(whole, max(lengths)), lengths, exec=exec)
    return np.stack([np.asarray(values)[i, n - NEW - 1 : n - 1] for i, n in enumerate(lengths)])


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forced_decoding_is_scored_as_score_does(exact):
    exec = ij.Exec(exact=exact)
    result = run(exec, forced_token_ids=FORCED)
    assert result.tokens[:, :4].tolist() == [list(FORCED)] * 2
    if exact:
        np.testing.assert_array_equal(result.logprobs, scores(result, exec))
    else:
        np.testing.assert_allclose(result.logprobs, scores(result, exec), **TINY_LOGPROBS_F32)


def test_forcing_what_would_be_drawn_changes_nothing():
    free = run()
    forced = run(forced_token_ids=free.tokens[0])  # more rows than one are forced alike
    np.testing.assert_array_equal(free.tokens[0], forced.tokens[0])
    np.testing.assert_allclose(free.logprobs[0], forced.logprobs[0], **TINY_LOGPROBS_F32)
    np.testing.assert_allclose(
        free.sampled_logprobs[0], forced.sampled_logprobs[0], **TINY_LOGPROBS_F32
    )
    half = run(forced_token_ids=free.tokens[0, :3])
    np.testing.assert_array_equal(free.tokens[0], half.tokens[0])


def test_forced_ids_beyond_the_new_tokens_are_left_out():
    result = run(forced_token_ids=[*FORCED, *FORCED])
    assert result.tokens.tolist() == [[*FORCED, *FORCED][:NEW]] * 2


def test_forced_row_ends_by_its_stop_ids_and_max_tokens():
    stopped = run(forced_token_ids=FORCED, stop_token_ids=[40])
    assert stopped.lengths.tolist() == [2, 2]
    limited = run(forced_token_ids=FORCED, max_tokens=3)
    assert limited.lengths.tolist() == [3, 3]
    assert limited.tokens[:, :3].tolist() == [list(FORCED[:3])] * 2


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chosen_logprobs_follow_the_ids_of_the_request(exact):
    exec = ij.Exec(exact=exact)
    result = run(exec, forced_token_ids=FORCED)
    assert result.chosen_logprobs.shape == (2, NEW, 3)
    for column, token in enumerate((7, 40, 11)):
        same = result.tokens == token
        assert same.any()
        np.testing.assert_array_equal(
            result.chosen_logprobs[..., column][same], result.logprobs[same]
        )
    assert (np.exp(result.chosen_logprobs).sum(-1) < 1).all()


def test_stream_is_forced_and_reports_chosen_ids_as_generate_does():
    model = tiny_model("llama")
    fields = {"seed": 3, "max_tokens": NEW, "ignore_eos": True, "temperature": 0.9}
    request = ij.SamplingParams(**fields, forced_token_ids=FORCED, logprob_token_ids=[7, 5, 2])
    prompt = [5, 9, 33]
    events = list(ij.stream(model, prompt, request, steps=4))
    want = ij.generate(model.params, model.config, [prompt], max_new_tokens=NEW, sampling=request)
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == np.asarray(want.tokens)[0].tolist()
    assert tokens[:4] == list(FORCED)
    chosen = [values for event in events for values in event.chosen_logprobs]
    np.testing.assert_allclose(chosen, np.asarray(want.chosen_logprobs)[0], **TINY_LOGPROBS_F32)


def test_stream_forces_no_more_than_it_may_draw():
    request = ij.SamplingParams(temperature=0.0, max_tokens=2, forced_token_ids=FORCED)
    events = list(ij.stream(tiny_model("llama"), [5, 9, 33], request))
    assert [token for event in events for token in event.token_ids] == list(FORCED[:2])
    assert events[-1].finish_reason == "length"
