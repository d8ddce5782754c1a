"""What `Engine.sequences` shows: phases, slots, and block tables with their shared pages."""

import pytest
from engines import drain, make_engine, random_prompt

import inferjax as ij

PAGE = 8
SAMPLING = ij.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine() -> ij.Engine:
    """Return an engine whose dispatches are collected before the next plan."""
    return make_engine(overlap=False)


def step_until_all_decode(engine: ij.Engine) -> list:
    while any(view.phase != "decode" for view in engine.sequences()):
        engine.step()
    return engine.sequences()


def test_a_request_is_seen_from_submission_to_its_end(engine):
    name = engine.submit(random_prompt(40), SAMPLING)
    (view,) = engine.sequences()
    assert (view.request_id, view.index, view.phase, view.slot) == (name, 0, "waiting", None)
    assert (view.prompt_tokens, view.num_tokens, view.pages) == (40, 40, ())
    engine.step()
    (view,) = engine.sequences()
    assert (view.phase, view.slot, len(view.pages[0])) == ("prefill", None, 32 // PAGE)
    (view,) = step_until_all_decode(engine)
    assert view.slot == 0
    (done,) = drain(engine).values()
    assert len(done.token_ids) == 20
    assert engine.sequences() == []


def test_tables_share_the_pages_of_a_common_prefix_only(engine):
    prefix = random_prompt(2 * PAGE, seed=1)
    for seed in (2, 3):
        engine.submit(prefix + random_prompt(5, seed=seed), SAMPLING)
    first, second = step_until_all_decode(engine)
    assert first.pages[0][:2] == second.pages[0][:2]
    assert not set(first.pages[0][2:]) & set(second.pages[0][2:])
    assert engine.stats().pages_live[0] == len({*first.pages[0], *second.pages[0]})
    drain(engine)


def test_samples_are_seen_one_by_one_and_share_full_pages(engine):
    settings = ij.SamplingParams(n=3, seed=0, max_tokens=20, ignore_eos=True)
    engine.submit(random_prompt(2 * PAGE + 3), settings)
    views = step_until_all_decode(engine)
    assert [view.index for view in views] == [0, 1, 2]
    assert sorted(view.slot for view in views) == [0, 1, 2]
    tables = [view.pages[0] for view in views]
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    drain(engine)
