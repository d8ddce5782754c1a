"""After the warm-up nothing compiles, whatever is asked for; if it does, it is named."""

import dataclasses
import logging

import jax
import pytest
from engines import SMALL, drop_programs, make_engine, random_prompt, shared_engine
from tiny_models import tiny_model

import inferjax as ij
from inferjax.engine.compilations import CompileWatch
from inferjax.errors import UnexpectedCompilation

EVERY_FEATURE = [
    ij.SamplingParams(temperature=0.0, max_tokens=5),
    ij.SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_tokens=9, seed=3),
    ij.SamplingParams(max_tokens=4, n=3, seed=1),
    ij.SamplingParams(
        max_tokens=7, repetition_penalty=1.3, presence_penalty=1, frequency_penalty=1
    ),
    ij.SamplingParams(max_tokens=7, logit_bias={5: 3.0, 6: -3.0}, allowed_token_ids=[5, 6, 7]),
    ij.SamplingParams(
        max_tokens=7, bad_token_ids=[5, [6, 7]], stop_token_ids=[9, 10], min_tokens=2
    ),
    ij.SamplingParams(max_tokens=3, logprobs=3, logprob_token_ids=[4, 8], temperature=0.0),
    ij.SamplingParams(max_tokens=3, prompt_logprobs=2, temperature=0.0),
    ij.SamplingParams(max_tokens=6, forced_token_ids=[4, 5, 6]),
    ij.SamplingParams(max_tokens=0, prompt_logprobs=0),
    ij.SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=30),
]


def test_a_mixed_workload_compiles_nothing_after_the_warm_up():
    engine = shared_engine()
    before = engine.stats()
    prompts = [random_prompt(1 + 6 * i, seed=i) for i in range(len(EVERY_FEATURE))]
    for _ in range(2):
        done = engine.generate(prompts, EVERY_FEATURE)
        assert [completion.error for completion in done] == [None] * len(done)
    doomed = engine.submit(prompts[5], EVERY_FEATURE[-1])
    engine.step()
    engine.abort(doomed)
    after = engine.stats()
    assert (after.compilations, after.late_compilations) == (before.compilations, 0)
    # Fewer if an engine of the same sizes has warmed up in this process.
    assert before.compilations <= engine.buckets.num_programs


def test_a_shared_engine_is_warm_after_programs_were_dropped():
    """A worker of a long run drops them between modules."""
    shared_engine()
    drop_programs()
    settings = ij.SamplingParams(temperature=0.0, max_tokens=2)
    (done,) = shared_engine().generate([random_prompt(5)], settings)
    assert done.error is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_warm_up_compiles_as_many_programs_as_it_says(family):
    stats = (engine := make_engine(family, warm=True, max_len=72, prefill_buckets=None)).stats()
    assert stats.compilations == engine.buckets.num_programs
    assert stats.compile_s > 0


def test_a_late_compilation_is_counted_and_its_argument_named(caplog):
    config = dataclasses.replace(SMALL, strict=False)
    engine = ij.Engine(tiny_model("llama"), config, exec=ij.Exec(page_size=8))
    engine.warmup()
    params = tiny_model("llama").params
    engine.update_params(params.replace(embed=params.embed.astype("bfloat16")))
    with caplog.at_level(logging.WARNING, logger="inferjax"):
        engine.generate([random_prompt(5)], ij.SamplingParams(temperature=0.0, max_tokens=2))
    assert engine.stats().late_compilations > 0
    assert "embed: float32[320, 64] -> bfloat16[320, 64]" in caplog.text


def test_a_strict_engine_raises_and_works_again_with_what_it_knows():
    engine = make_engine(warm=True)
    params = tiny_model("llama").params
    engine.update_params(params.replace(embed=params.embed.astype("float16")))
    with pytest.raises(UnexpectedCompilation, match="compiled after the warm-up"):
        engine.generate([random_prompt(5)], ij.SamplingParams(temperature=0.0, max_tokens=2))
    assert not engine.has_work
    engine.update_params(params)
    (done,) = engine.generate([random_prompt(5)], ij.SamplingParams(temperature=0.0, max_tokens=2))
    assert len(done.token_ids) == 2


def test_a_warm_up_while_requests_run_changes_nothing():
    sampling = ij.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine, prompt = make_engine(), random_prompt(5)
    (alone,) = engine.generate([prompt], sampling)
    ids = []
    for count, delta in enumerate(engine.stream(prompt, sampling)):
        ids += delta.tokens.ids
        if count == 0:
            engine.warmup()
    assert tuple(ids) == alone.token_ids


def test_an_engine_without_a_warm_up_does_not_remember_every_call():
    watch = CompileWatch()
    for _ in range(3):
        watch.call("program", lambda x: x, 1)
    assert not watch._known


def test_a_reset_gives_up_the_old_cache_first():
    programs = make_engine()._core.programs
    old = jax.tree.leaves(programs._cache)
    programs.reset()
    assert all(leaf.is_deleted() for leaf in old)


def test_the_bucket_plan_is_described():
    text = shared_engine().buckets.describe()
    assert "programs" in text
    assert "padding" in text
