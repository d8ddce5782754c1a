"""Requests that outgrow the context of an engine over real models."""

import functools
import itertools

import pytest
from engines import drain, make_engine, random_prompt

import inferjax as ij
from inferjax.engine.overflow import middle_of
from inferjax.errors import RequestTooLong, UnsupportedConfig

SLOW = pytest.mark.slow
CONTEXT = 48
LOSSY = {"overflow": "lossy_sinks", "max_len": CONTEXT, "sink_tokens": 5}
LONG = ij.SamplingParams(temperature=0.8, seed=3, max_tokens=3 * CONTEXT, ignore_eos=True)


@functools.cache
def lossy_engine(**changes: object) -> ij.Engine:
    return make_engine(**{**LOSSY, **changes})


def pages_balance(engine: ij.Engine) -> bool:
    pages = engine._core.scheduler.pages
    pages.check()
    return not any(pool.num_live for pool in pages.pools)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=SLOW) for f in ("gemma3_text", "deepseek_v3"))]
)
def test_a_chat_goes_on_past_its_context(family):
    engine = make_engine(family, **LOSSY)
    (done,) = engine.generate([random_prompt(20)], LONG)
    assert done.error is None
    assert (len(done.token_ids), done.finish_reason) == (3 * CONTEXT, "length")
    dropped = middle_of(CONTEXT, 5, 8).size * engine.stats().totals.shifts
    assert done.usage.dropped_tokens == dropped
    assert 20 + 3 * CONTEXT - dropped <= CONTEXT
    assert pages_balance(engine)


@pytest.mark.slow
def test_the_warm_up_compiles_the_shift():
    # Sizes of its own: what another engine has compiled would not be counted.
    engine = make_engine(warm=True, **{**LOSSY, "max_len": 56, "num_pages": 51})
    before = engine.stats()
    engine.generate([random_prompt(20)], LONG)
    assert before.compilations == engine.buckets.num_programs
    assert engine.stats().late_compilations == 0


@pytest.mark.slow
def test_exact_results_do_not_depend_on_mates_slots_or_steps():
    prompt, mates = random_prompt(20), [random_prompt(n, seed=n) for n in (3, 45)]
    found = []
    for changes, others in (({}, []), ({}, mates), ({"decode_steps": 1}, mates[:1])):
        engine = lossy_engine(exact=True, **changes)
        *_, done = engine.generate([*others, prompt], LONG)
        found.append((done.token_ids, done.samples[0].logprobs, done.usage.dropped_tokens))
    assert found[0] == found[1] == found[2]


def test_positions_that_come_again_draw_other_numbers():
    """A model that always sees the same must not repeat itself with every drop."""
    engine, size = lossy_engine(), middle_of(CONTEXT, 5, 8).size
    flat = ij.SamplingParams(temperature=1e6, seed=1, max_tokens=4 * CONTEXT, ignore_eos=True)
    (done,) = engine.generate([random_prompt(40)], flat)
    ids = done.token_ids[CONTEXT - 40 :]
    parts = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
    assert len(parts) > 3
    assert all(one != other for one, other in itertools.combinations(parts, 2))


def test_a_long_prompt_keeps_its_sinks_and_its_end():
    engine, prompt = lossy_engine(), random_prompt(100)
    middle = middle_of(CONTEXT, 5, 8)
    kept = prompt[: middle.start] + prompt[-(CONTEXT - middle.size - middle.start) :]
    short = ij.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    whole, cut = engine.generate([prompt, kept], short)
    assert whole.token_ids == cut.token_ids
    assert whole.prompt_ids == tuple(prompt)
    assert whole.usage.prompt_tokens == 100
    assert (whole.usage.dropped_tokens, cut.usage.dropped_tokens) == (100 - len(kept), 0)


def test_without_max_tokens_nothing_is_dropped():
    (done,) = lossy_engine().generate(
        [random_prompt(20)], ij.SamplingParams(temperature=0.0, ignore_eos=True)
    )
    assert len(done.token_ids) == CONTEXT - 20
    assert done.usage.dropped_tokens == 0


def test_streams_and_aborts_work_after_a_drop():
    engine = lossy_engine()
    name = engine.submit(random_prompt(30), LONG)
    count = 0
    while count < CONTEXT:
        count += sum(len(delta.tokens.ids) for delta in engine.step())
    assert len(engine.abort(name).token_ids) == count
    drain(engine)
    assert pages_balance(engine)


def test_prompt_logprobs_need_the_whole_prompt():
    scored = ij.SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    with pytest.raises(RequestTooLong):
        lossy_engine().submit(random_prompt(100), scored)


def test_the_default_refuses():
    with pytest.raises(RequestTooLong):
        make_engine(max_len=CONTEXT).submit(random_prompt(20), LONG)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("gpt2", {}, "learned"),
        ("llama", {"sink_tokens": 40}, "two pages"),
        ("llama", {"sink_tokens": -1}, "sink_tokens"),
        ("llama", {"overflow": "drop"}, "lossy_sinks"),
    ],
)
def test_what_cannot_stream_is_refused_at_the_start(family, changes, text):
    with pytest.raises(UnsupportedConfig, match=text):
        make_engine(family, **{**LOSSY, **changes})
