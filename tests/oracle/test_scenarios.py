"""Single events that classic engines get wrong, each played through an engine over the oracle."""

import pytest
from house import House
from rig import Wish, make_rig

from inferjax.errors import InvalidInput
from inferjax.sampling import SamplingParams

PROMPT = tuple(range(3, 43))


def wish(length, max_tokens=8, *, seed=5, start=0, priority=0, salt=None, **fields):
    fields = {"ignore_eos": True, **fields}
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **fields)
    return Wish(PROMPT[start : start + length], sampling, priority, salt)


def sequence_of(house, name, index=0):
    return house.accounts.requests[name].samples[index].sequence


def step_until(house, condition, most=200):
    for _ in range(most):
        if condition():
            return
        house.step()
    raise AssertionError("it never happened")


def test_prompt_scores_survive_a_preemption_while_decoding():
    """What is prefilled again after the prompt must not be taken for scores of the prompt."""
    rig = make_rig((None,), num_pages=14, max_len=48, decode_steps=2, row_tokens=4, token_budget=8)
    house = House(rig)
    first = house.enter(wish(8, 36, priority=-1))
    name = house.enter(wish(5, 30, start=9, prompt_logprobs=2))
    step_until(house, lambda: sequence_of(house, name).num_preemptions)
    assert len(sequence_of(house, name).tokens) > 12
    house.run()
    assert house.completions[name].num_preemptions
    assert not house.completions[first].num_preemptions


def test_evicted_prefix_is_not_found_again():
    """Phantom hits: digests of pages that meanwhile hold something else."""
    house = House(make_rig((None, 6), num_pages=14, max_len=48))
    for turn in range(5):
        again = house.enter(wish(20, 4, seed=turn))
        house.run()
        hit = house.enter(wish(20, 4, seed=turn + 50))
        house.run()
        house.enter(wish(30, 18, start=5, seed=turn))
        house.run()
        assert house.completions[hit].usage.cached_tokens == 16
        assert house.completions[again].usage.cached_tokens == 0


def test_pages_of_a_running_prompt_are_found_at_once():
    house = House(make_rig((None, 6), num_pages=60))
    names = [house.enter(wish(17 + i, 4, seed=i)) for i in range(4)]
    house.run()
    cached = [house.completions[name].usage.cached_tokens for name in names]
    assert cached == [0, 16, 16, 16]


def test_salt_keeps_caches_apart():
    house = House(make_rig(num_pages=60))
    found = []
    for salt in (None, "a", "b", "a", None):
        name = house.enter(wish(20, 4, salt=salt))
        house.run()
        found.append(house.completions[name].usage.cached_tokens)
    assert found == [0, 0, 0, 16, 16]


@pytest.mark.parametrize("length", range(4, 13))
@pytest.mark.parametrize("steps", [1, 3])
def test_preempted_sequence_resumes_at_any_place_in_a_page(length, steps):
    house = House(make_rig((None, 6), num_pages=13, max_len=48, decode_steps=steps))
    house.enter(wish(4, 44, priority=-1))
    name = house.enter(wish(length, 30, start=7))
    step_until(house, lambda: sequence_of(house, name).num_preemptions)
    house.run()


def test_resume_from_the_cache_alone_needs_no_prefill():
    """All but the newest token are in full pages that are still cached."""
    house = House(make_rig((None,), num_pages=40, decode_steps=1))
    name = house.enter(wish(8, 9))
    sequence = sequence_of(house, name)
    step_until(house, lambda: len(sequence.tokens) == 14)
    scheduler = house.accounts.scheduler
    # Everything under way comes back before the sequence loses its pages.
    step_until(house, lambda: len(sequence.tokens) == 16)
    scheduler.preempt(sequence)
    extends = house.rig.engine.stats().totals.extend_dispatches
    house.run()
    assert house.rig.engine.stats().totals.extend_dispatches - extends <= 1


@pytest.mark.parametrize("windows", [(None, 6), (6, 6), (None, 4), (None, 1)])
@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8, 11, 12, 13])
def test_window_edges(windows, length):
    house = House(make_rig(windows, num_pages=40, decode_steps=2))
    for seed in range(3):
        house.enter(wish(length, 14, seed=seed))
        house.run()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_siblings_share_their_prompt(length, max_running):
    house = House(make_rig((None, 6), num_pages=60, max_running=max_running))
    name = house.enter(wish(length, 9, n=4))
    house.run()
    assert house.rig.engine.stats().totals.prefill_tokens <= length + 3 * (length % 4 + 4)
    ids = [sample.token_ids for sample in house.completions[name].samples]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("max_running", [1, 3])
def test_leader_ends_while_siblings_wait(max_tokens, max_running):
    house = House(make_rig((None, 6), num_pages=24, max_running=max_running))
    house.enter(wish(9, max_tokens, n=4))
    house.enter(wish(6, 5, n=3, start=3))
    house.run()


@pytest.mark.parametrize("steps", range(6))
def test_abort_of_a_request_with_samples_in_all_phases(steps):
    house = House(make_rig((None, 6), num_pages=24, max_running=2, row_tokens=4, token_budget=4))
    name = house.enter(wish(14, 9, n=4))
    other = house.enter(wish(14, 9, seed=8, n=2))
    for _ in range(steps):
        house.step()
    house.abort(name)
    house.run()
    assert other in house.completions


def test_name_is_free_after_an_abort_and_nothing_old_arrives():
    house = House(make_rig((None, 6), num_pages=24, decode_steps=4))
    for turn in range(60):
        house.enter(wish(5 + turn % 9, 12, seed=turn, start=turn % 5), "again")
        for _ in range(turn % 4):
            house.step()
        if "again" in house.guests:
            house.abort("again")
    house.enter(wish(7, 12, seed=77), "again")
    house.run()
    with pytest.raises(InvalidInput, match="again"):
        house.rig.engine.abort("again")


def test_low_priority_is_served_in_the_end():
    house = House(make_rig(num_pages=24, max_running=2, priority_window=10))
    low = house.enter(wish(6, 6, priority=3))
    for turn in range(200):
        while len(house.guests) < 6:
            house.enter(wish(6, 6, seed=turn, priority=-1, start=turn % 9))
        house.step()
        if low not in house.guests:
            break
    assert low in house.completions
    house.run()


def test_prompt_without_output_is_scored():
    house = House(make_rig((None, 6), num_pages=40, row_tokens=4, token_budget=8))
    names = [house.enter(wish(n, 0, prompt_logprobs=1)) for n in (1, 2, 4, 9, 21)]
    house.run()
    assert [len(house.completions[name].token_ids) for name in names] == [0] * 5


def test_a_shared_system_prompt_is_prefilled_once():
    """32 requests behind 600 common tokens: at least nine tenths of the prefill are saved."""
    common = tuple(i % 58 + 3 for i in range(600))
    prompts = [(*common, i % 50 + 3, i + 4, *range(5, 11)) for i in range(32)]
    computed = {}
    for caching in (False, True):
        rig = make_rig(
            (None,),
            page_size=16,
            max_context=640,
            max_running=32,
            token_budget=256,
            prefix_caching=caching,
        )
        house = House(rig)
        for i, prompt in enumerate(prompts):
            house.enter(Wish(prompt, SamplingParams(max_tokens=3, seed=i, ignore_eos=True)))
        house.run()
        computed[caching] = rig.engine.stats().totals.prefill_tokens
    assert computed[False] == 32 * 608
    assert computed[True] <= 0.1 * computed[False]
