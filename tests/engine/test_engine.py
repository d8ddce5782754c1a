"""What the engine returns: the results of the functions, whatever else is asked for."""

import numpy as np
import pytest
from engines import make_engine, random_prompt, shared_engine, text_engine
from tiny_models import padded, tiny_model

import inferjax as ij
from inferjax.errors import InvalidInput

GREEDY = ij.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def slow(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def score_of(tokens: tuple[int, ...], prompt_len: int) -> np.ndarray:
    model = tiny_model("llama")
    scores = ij.score(model.params, model.config, np.array([tokens]))
    return np.asarray(scores)[0, prompt_len - 1 :]


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", *slow("gpt_oss", "deepseek_v3", "gpt2")]
)
def test_a_mixed_batch_equals_generate(family):
    model, engine = tiny_model(family), shared_engine(family)
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 23, 40, 8, 16)]
    done = engine.generate(prompts, GREEDY)
    width = max(map(len, prompts))
    alone = ij.generate(
        model.params,
        model.config,
        padded([np.array(p) for p in prompts], width),
        [len(p) for p in prompts],
        max_new_tokens=12,
        sampling=ij.make_sampling(6, temperature=0.0, ignore_eos=True),
    )
    for i, completion in enumerate(done):
        assert completion.token_ids == tuple(alone.tokens[i].tolist())
        np.testing.assert_allclose(completion.samples[0].logprobs, alone.logprobs[i], **TOLERANCE)
        assert completion.finish_reason == "length"


def test_samples_equal_num_samples_of_generate():
    model, engine = tiny_model("llama"), shared_engine()
    prompt = random_prompt(13)
    settings = ij.SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    (done,) = engine.generate([prompt], settings)
    single = ij.SamplingParams(seed=5, max_tokens=9, ignore_eos=True)
    wanted = ij.generate(
        model.params,
        model.config,
        np.array([prompt]),
        max_new_tokens=9,
        sampling=single,
        num_samples=3,
    )
    found = [sample.token_ids for sample in done.samples]
    assert found == [tuple(row) for row in np.asarray(wanted.tokens[0]).tolist()]
    assert len(set(found)) == 3


def test_a_stream_brings_the_whole_in_parts():
    engine, prompt = shared_engine(), random_prompt(20)
    (whole,) = engine.generate([prompt], GREEDY)
    deltas = list(engine.stream(prompt, GREEDY))
    assert len(deltas) > 2
    assert sum((delta.tokens.ids for delta in deltas), ()) == whole.token_ids
    assert [d.finish_reason for d in deltas][-2:] == [None, "length"]
    last = deltas[-1].completion
    assert last is not None
    assert last.token_ids == whole.token_ids
    assert len(last.samples[0].arrivals) == len(deltas)


def test_closing_a_stream_aborts_it():
    engine = shared_engine()
    stream = engine.stream(random_prompt(20), GREEDY)
    next(stream)
    stream.close()
    assert not engine.has_work or engine.step() == []
    assert engine.stats().running == 0


def test_prompt_logprobs_equal_score_and_top_lists_hold_them():
    engine, prompt = shared_engine(), random_prompt(37)
    settings = ij.SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    first, second = engine.generate([prompt, prompt], settings)
    wanted = score_of(tuple(prompt), 1)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    np.testing.assert_allclose(first.prompt_logprobs[1:], wanted, **TOLERANCE)
    np.testing.assert_allclose(second.prompt_logprobs[1:], wanted, **TOLERANCE)
    tops = first.prompt_top_logprobs
    assert tops is not None
    for token, value, top in zip(prompt[1:], first.prompt_logprobs[1:], tops[1:], strict=True):
        values = [logprob for _, logprob in top]
        assert len(top) == 3
        assert values == sorted(values, reverse=True)
        assert dict(top).get(token, value) == pytest.approx(value, abs=1e-6)


def test_max_tokens_zero_only_scores_the_prompt():
    settings = ij.SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    prompt = random_prompt(19)
    (done,) = shared_engine().generate([prompt], settings)
    assert done.token_ids == ()
    assert done.finish_reason == "length"
    np.testing.assert_allclose(done.prompt_logprobs[1:], score_of(tuple(prompt), 1), **TOLERANCE)


def test_forced_tokens_are_followed_and_scored():
    prompt, forced = random_prompt(9), random_prompt(7, seed=9)
    settings = ij.SamplingParams(
        temperature=0.0, max_tokens=10, forced_token_ids=forced, ignore_eos=True
    )
    (done,) = shared_engine().generate([prompt], settings)
    assert done.token_ids[:7] == tuple(forced)
    wanted = score_of((*prompt, *done.token_ids), len(prompt))
    np.testing.assert_allclose(done.samples[0].logprobs, wanted, **TOLERANCE)


def test_top_and_chosen_logprobs_belong_to_the_drawn_distribution():
    settings = ij.SamplingParams(
        temperature=0.0, max_tokens=6, logprobs=2, logprob_token_ids=[5, 9], ignore_eos=True
    )
    plain = ij.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = random_prompt(11)
    asked, other = shared_engine().generate([prompt, random_prompt(12)], [settings, plain])
    tokens = asked.samples[0].tokens
    for token, value, top, chosen in zip(
        tokens.ids, tokens.logprobs, tokens.top_logprobs, tokens.chosen_logprobs, strict=True
    ):
        assert top[0] == (token, pytest.approx(value, abs=1e-6))
        assert len(top) == len(chosen) == 2
        assert all(logprob < 0 for logprob in chosen)
    assert other.samples[0].tokens.top_logprobs == ()
    assert other.samples[0].tokens.chosen_logprobs == ()


def test_a_stop_id_ends_a_row_and_is_named():
    engine, prompt = shared_engine(), random_prompt(10)
    (free,) = engine.generate([prompt], GREEDY)
    stop = free.token_ids[4]
    settings = ij.SamplingParams(
        temperature=0.0, max_tokens=12, stop_token_ids=[stop], ignore_eos=True
    )
    (done,) = engine.generate([prompt], settings)
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (done.finish_reason, done.samples[0].stop_reason) == ("stop", stop)


def test_usage_counts_cached_tokens_of_a_repeated_prompt():
    engine, prompt = make_engine(), random_prompt(33, seed=3)
    (cold,) = engine.generate([prompt], GREEDY)
    (warm,) = engine.generate([prompt], GREEDY)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 32)
    assert (warm.usage.prompt_tokens, warm.usage.completion_tokens) == (33, 12)
    assert warm.token_ids == cold.token_ids


def test_a_salt_keeps_prompts_apart():
    engine, prompt = make_engine(), random_prompt(33, seed=3)
    engine.generate([prompt], GREEDY, cache_salt="a")
    (other,) = engine.generate([prompt], GREEDY, cache_salt="b")
    (same,) = engine.generate([prompt], GREEDY, cache_salt="a")
    assert (other.usage.cached_tokens, same.usage.cached_tokens) == (0, 32)


def test_new_weights_find_no_pages_of_the_old():
    engine, prompt = make_engine(), random_prompt(33, seed=3)
    (old,) = engine.generate([prompt], GREEDY)
    params = tiny_model("llama").params
    engine.update_params(params.replace(embed=params.embed * 2))
    (new,) = engine.generate([prompt], GREEDY)
    assert new.usage.cached_tokens == 0
    assert new.samples[0].logprobs != old.samples[0].logprobs


def test_timings_add_up():
    (done,) = shared_engine().generate([random_prompt(20)], GREEDY)
    times = done.timings
    assert times.ttft_s == pytest.approx(times.queue_s + times.prefill_s)
    assert 0 < times.ttft_s < times.e2e_s
    assert times.tpot_s == pytest.approx((times.e2e_s - times.ttft_s) / 11)


def test_a_lower_priority_number_goes_first():
    engine = make_engine(max_running=1)
    names = [engine.submit(random_prompt(9, seed=i), GREEDY, priority=1) for i in range(3)]
    urgent = engine.submit(random_prompt(9, seed=9), GREEDY, priority=0)
    order = []
    while engine.has_work:
        order += [d.request_id for d in engine.step() if d.completion is not None]
    assert order == [urgent, *names]


def test_an_abort_returns_what_there_is_and_spares_the_others():
    engine = shared_engine()
    (alone,) = engine.generate([random_prompt(14, seed=1)], GREEDY)
    victim = engine.submit(random_prompt(14, seed=2), GREEDY)
    other = engine.submit(random_prompt(14, seed=1), GREEDY)
    deltas = []
    while not any(delta.request_id == victim for delta in deltas):
        deltas += engine.step()
    aborted = engine.abort(victim)
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 12
    while engine.has_work:
        deltas += engine.step()
    done = [d.completion for d in deltas if d.completion is not None]
    assert [completion.request_id for completion in done] == [other]
    assert done[0].token_ids == alone.token_ids
    with pytest.raises(InvalidInput, match="no request"):
        engine.abort(victim)


def test_seeds_repeat_and_the_engine_can_choose_them():
    prompt = random_prompt(6)
    drawn = ij.SamplingParams(max_tokens=8, ignore_eos=True)
    runs = [make_engine(seed=seed).generate([prompt] * 2, drawn) for seed in (1, 1, 2)]
    ids = [[completion.token_ids for completion in run] for run in runs]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0][0] != ids[0][1]


def test_echo_begins_with_the_prompt_and_texts_join():
    engine = text_engine()
    settings = ij.SamplingParams(temperature=0.0, max_tokens=8, echo=True, ignore_eos=True)
    deltas = list(engine.stream("hello world", settings))
    text = "".join(delta.text for delta in deltas)
    assert text.startswith("hello world")
    assert deltas[-1].completion.text == text


def test_a_stop_string_ends_the_text_before_it():
    engine = text_engine()
    settings = ij.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (free,) = engine.generate(["hello"], settings)
    stop = free.text[6:8]
    cut = free.text[: free.text.index(stop)]
    kept = ij.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop])
    shown = ij.SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop], include_stop=True
    )
    without, included = engine.generate(["hello"] * 2, [kept, shown])
    assert (without.text, included.text) == (cut, cut + stop)
    assert without.finish_reason == "stop"
    assert without.samples[0].stop_reason == stop
    assert len(without.token_ids) < 40
    assert engine.stats().running == 0


def test_special_tokens_are_in_the_text_only_if_wanted():
    engine = text_engine()
    fields = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "echo": True}
    fields["forced_token_ids"] = [104, 1, 108]
    hidden, shown = engine.generate(
        [[1, 107]] * 2,
        [ij.SamplingParams(**fields), ij.SamplingParams(**fields, skip_special_tokens=False)],
    )
    assert shown.text.count("<|im_start|>") == 2
    assert hidden.text == shown.text.replace("<|im_start|>", "")
