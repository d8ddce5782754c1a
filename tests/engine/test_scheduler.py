"""The scheduler's decisions one by one; random schedules are in tests/property."""

import pytest
from policy_runs import Run

from inferjax.engine.sequence import Phase


def prompt(num_tokens, first=1):
    """Return tokens that never meet those of another `first`."""
    return [first * 1000 + i for i in range(num_tokens)]


def settle(run, num_plans=1):
    """Make plans and collect everything after each."""
    plan = None
    for _ in range(num_plans):
        plan = run.plan()
        while run.flights:
            run.collect()
    return plan


def until_preempted(run, *, collect):
    """Return the plans up to the first that preempts."""
    plans = []
    while not (plans and plans[-1].preempted):
        assert len(plans) < 50
        plans.append(settle(run) if collect else run.plan())
    return plans


def spans(plan):
    return [(chunk.sequence.uid, chunk.start, chunk.stop, chunk.last) for chunk in plan.chunks]


def uids(sequences):
    return [sequence.uid for sequence in sequences]


def test_prompt_is_cut_into_chunks_of_the_rows_there_are():
    run = Run(row_tokens=4, max_rows=2, token_budget=100)
    run.add(prompt(19))
    assert [spans(run.plan()) for _ in range(3)] == [
        [(0, 0, 8, False)],
        [(0, 8, 16, False)],
        [(0, 16, 19, True)],
    ]


def test_first_token_and_decode_are_planned_with_the_last_chunk():
    run = Run(decode_steps=3)
    sequence = run.add(prompt(5), 8)
    plan = run.plan()
    assert plan.placed == plan.decode == [sequence]
    assert (plan.steps, sequence.ahead, sequence.in_flight, sequence.slot) == (3, 4, 2, 0)
    assert sequence.computed == 5
    assert len(sequence.pages[0]) == 2
    run.drain()


def test_decode_never_takes_pages_beyond_the_longest_output():
    run = Run(decode_steps=8)
    sequence = run.add(prompt(6), 3)
    run.plan()
    # Positions 0 to 7: the ninth token is drawn, and never written.
    assert len(sequence.pages[0]) == 2
    assert sequence.reach == sequence.max_len
    assert run.plan().empty


def test_budget_leaves_rows_for_prompts_beside_decoding():
    run = Run(row_tokens=4, max_rows=4, token_budget=9, max_running=8)
    for i in range(3):
        run.add(prompt(3, i), 50)
    # 9 tokens are two rows; beside two decoding sequences they are one.
    assert uids(c.sequence for c in run.plan().chunks) == [0, 1]
    assert uids(c.sequence for c in run.plan().chunks) == [2]


def test_prompt_advances_by_a_row_however_many_decode():
    run = Run(row_tokens=4, max_rows=4, token_budget=4, max_running=8, num_pages=200)
    for i in range(4):
        run.add(prompt(2, i), 90)
    for i in range(4):
        assert uids(c.sequence for c in run.plan().chunks) == [i]


def test_prompts_in_flight_shorten_the_decode():
    run = Run(decode_steps=8, mixed_steps=2, row_tokens=4, max_rows=1)
    run.add(prompt(4), 90)
    assert run.plan().steps == 2
    assert run.plan().steps == 8
    run.add(prompt(6, 2), 90)
    assert [run.plan().steps for _ in range(3)] == [2, 2, 8]


def test_smaller_order_goes_first():
    run = Run(max_running=1)
    for order in (5, 3, 4):
        run.add(prompt(4, order), 1, order=order)
    assert [uids(c.sequence for c in settle(run).chunks) for _ in range(3)] == [[1], [2], [0]]


def test_head_of_the_queue_is_not_overtaken():
    run = Run(num_pages=10)
    run.add(prompt(16), 4)
    run.add(prompt(20, 2), 4)
    run.add(prompt(4, 3), 4)
    assert uids(c.sequence for c in run.plan().chunks) == [0]
    assert uids(c.sequence for c in run.plan().chunks) == []
    run.drain()


def test_latest_order_is_preempted_first_and_resumes():
    run = Run(num_pages=8, token_budget=64, decode_steps=1)
    first, second = run.add(prompt(8), 16), run.add(prompt(8, 2), 16)
    assert until_preempted(run, collect=True)[-1].preempted == [second]
    assert (second.phase, second.pages, second.slot) == (Phase.WAITING, (), -1)
    assert first.num_preemptions == 0
    run.drain()


def test_urgent_request_preempts_nobody_to_get_in():
    run = Run(num_pages=6, decode_steps=1)
    run.add(prompt(12), 4)
    run.plan()
    run.add(prompt(12, 2), 4, order=-100)
    assert not run.plan().preempted
    run.drain()


def test_needy_sequence_gives_way_to_smaller_orders():
    run = Run(num_pages=8, decode_steps=1)
    small, large = run.add(prompt(9), 2), run.add(prompt(10, 2), 30)
    # Nothing is collected, so the small one keeps its pages though it has no more to draw.
    plans = until_preempted(run, collect=False)
    assert plans[-1].preempted == [large]
    assert plans[-1].empty
    assert small.phase is Phase.DECODE
    run.drain()


def test_preempted_sequence_waits_for_its_results():
    run = Run(num_pages=8, decode_steps=1)
    first, second = run.add(prompt(8), 16), run.add(prompt(8, 2), 16)
    until_preempted(run, collect=False)
    run.end(first)
    assert second.in_flight
    assert run.plan().empty
    while second.in_flight:
        run.collect()
    assert run.plan().chunks
    run.drain()


@pytest.mark.parametrize(
    ("num_plans", "num_tokens", "chunks"),
    # All but the newest token are wanted, and full pages of 4 are found.
    [(3, 12, [(0, 8, 11, True)]), (4, 13, []), (5, 14, [(0, 12, 13, True)])],
)
def test_preempted_sequence_runs_only_what_the_cache_has_lost(num_plans, num_tokens, chunks):
    run = Run(num_pages=14, decode_steps=1)
    sequence = run.add(prompt(8), 24)
    settle(run, num_plans)
    assert len(sequence.tokens) == num_tokens
    run.scheduler.preempt(sequence)
    plan = run.plan()
    assert spans(plan) == chunks
    assert plan.placed == plan.decode == [sequence]
    assert sequence.ahead == 1
    assert sequence.cached == 0
    run.drain()


def test_lone_sequence_that_outgrows_the_pool_fails():
    run = Run(num_pages=4, decode_steps=2)
    sequence = run.add(prompt(8), 90)
    plans = [settle(run) for _ in range(10)]
    assert [plan.failed for plan in plans if plan.failed] == [[sequence]]
    # The pool holds 12 tokens, and the newest one needs no place.
    assert len(sequence.tokens) in (12, 13)


def test_prompt_that_never_fits_fails_and_the_next_one_runs():
    run = Run(num_pages=4)
    large, small = run.add(prompt(13), 4), run.add(prompt(4, 2), 1)
    plan = run.plan()
    assert plan.failed == [large]
    assert uids(c.sequence for c in plan.chunks) == [small.uid]
    assert run.scheduler.never_fits(13)
    assert not run.scheduler.never_fits(12)


def test_prompt_without_output_ends_with_its_last_chunk():
    run = Run(row_tokens=4, max_rows=1)
    sequence = run.add(prompt(6), 0)
    run.plan()
    plan = run.plan()
    assert spans(plan) == [(0, 4, 6, True)]
    assert not plan.placed
    run.collect()
    assert sequence.phase is Phase.PREFILL
    run.collect()
    assert sequence.phase is Phase.FINISHED


def test_pages_promised_to_a_prompt_are_not_given_to_the_next():
    run = Run(num_pages=13, row_tokens=4, max_rows=2, token_budget=100, page_size=4)
    run.add(prompt(28), 4)
    short = run.add(prompt(4, 2), 4)
    # 8 pages for the first one's life leave 4, of which one is for its growth.
    assert uids(c.sequence for c in run.plan().chunks) == [0]
    long = run.add(prompt(16, 3), 4)
    for _ in range(3):
        run.plan()
    assert short.phase is Phase.DECODE
    assert long.phase is Phase.WAITING
    assert not run.seen["preempted"]
    run.drain()


def test_decoding_sequence_has_a_page_in_reserve():
    run = Run(num_pages=6, decode_steps=1)
    run.add(prompt(8), 8)
    second = run.add(prompt(7, 2), 4)
    run.plan()
    # Three pages are taken and one is kept, so the two that are wanted are not there.
    assert run.pages.pools[0].num_available == 2
    assert second.phase is Phase.WAITING
    run.drain()


def test_decoding_sequence_with_all_its_pages_keeps_none_in_reserve():
    run = Run(num_pages=3, max_running=2, page_size=16)
    run.add(prompt(8), 8)
    second = run.add(prompt(7, 2), 6)
    run.plan()
    # One page holds all of the first, and the only other one is enough for the second.
    assert second.phase is Phase.DECODE
    run.drain()


def test_decode_gives_back_pages_that_its_window_has_left():
    run = Run(windows=(4,), decode_steps=1, num_pages=30)
    sequence = run.add(prompt(20), 40)
    for _ in range(12):
        settle(run)
        assert run.pages.pools[0].num_live <= 3
    assert len(sequence.tokens) > 30


def test_window_is_trimmed_before_anybody_is_preempted():
    run = Run(windows=(4,), decode_steps=1, num_pages=9, row_tokens=16, max_rows=1)
    run.add(prompt(4), 60)
    run.plan()
    second = run.add(prompt(16, 2), 60)
    # All 8 pages are live when the second one decodes position 20, and 3 are behind its window.
    plans = [run.plan() for _ in range(6)]
    assert second in plans[-1].decode
    assert second.pages[0][:3] == [0, 0, 0]
    assert not run.seen["preempted"]
    run.drain()


def test_lone_sequence_waits_for_results_that_move_its_window_on():
    run = Run(windows=(4,), decode_steps=2, num_pages=4, row_tokens=4, max_rows=1)
    sequence = run.add(prompt(5), 40)
    for _ in range(20):
        run.plan()
    assert sequence.phase is Phase.DECODE
    assert run.plan().empty
    run.drain()
    assert sequence not in run.spoiled


def test_samples_fork_after_their_leaders_prefill():
    run = Run(token_budget=64)
    leader = run.add(prompt(11), 9)
    children = [run.add(prompt(11), 9, leader=leader) for _ in range(2)]
    other = run.add(prompt(4, 5), 9)
    assert uids(c.sequence for c in run.plan().chunks) == [leader.uid]
    plan = run.plan()
    assert spans(plan)[:2] == [(child.uid, 10, 11, True) for child in children]
    assert uids(c.sequence for c in plan.chunks) == [1, 2, other.uid]
    assert len(plan.copies) == 2
    assert children[0].pages[0][:2] == leader.pages[0][:2]
    assert children[0].cached == 10
    run.drain()


def test_sample_whose_leader_has_ended_runs_alone():
    run = Run()
    leader = run.add(prompt(9), 2)
    child = run.add(prompt(9), 2, leader=leader)
    run.end(leader)
    plan = run.plan()
    assert spans(plan) == [(child.uid, 0, 9, True)]
    assert not plan.copies
    run.drain()


@pytest.mark.parametrize(("reads_cache", "start"), [(True, 8), (False, 0)])
def test_prompt_skips_what_is_cached_unless_all_of_it_must_run(reads_cache, start):
    run = Run()
    run.add(prompt(12), 1)
    settle(run)
    sequence = run.add(prompt(12), 1, reads_cache=reads_cache, scored=not reads_cache)
    plan = run.plan()
    assert spans(plan) == [(1, start, 12, True)]
    assert sequence.cached == start


def test_prefix_is_found_in_the_plan_that_computes_it():
    run = Run(token_budget=64)
    run.add(prompt(12), 1)
    run.add(prompt(14), 1)
    assert spans(run.plan()) == [(0, 0, 12, True), (1, 12, 14, True)]
    run.drain()


def test_prefix_that_was_evicted_is_computed_again():
    run = Run(num_pages=5)
    for _ in range(3):
        for first in (1, 2):
            run.add(prompt(15, first), 1)
            assert [(c.start, c.stop) for c in run.plan().chunks] == [(0, 15)]
            while run.flights:
                run.collect()
    run.drain()


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_abort_frees_pages_and_slot_at_once(phase):
    run = Run(row_tokens=4, max_rows=1)
    sequence = run.add(prompt(6), 9)
    for _ in range(["waiting", "prefill", "decode"].index(phase)):
        run.plan()
    assert sequence.phase.value == phase
    run.scheduler.abort(sequence)
    run.scheduler.abort(sequence)
    run.spoiled.add(sequence)
    run.check()
    assert run.pages.pools[0].num_live == 0
    next_one = run.add(prompt(3, 2), 9)
    run.plan()
    assert next_one.slot == 0
    run.drain()


def test_holes_are_closed_when_a_smaller_bucket_will_do():
    run = Run(max_running=8, max_rows=8, token_budget=100, buckets=(2, 4, 8), num_pages=99)
    sequences = [run.add(prompt(3, i), 60) for i in range(6)]
    run.plan()
    assert [s.slot for s in sequences] == list(range(6))
    run.end(sequences[1])
    assert run.plan().moves == []
    run.end(sequences[0])
    assert run.plan().moves == [(5, 0), (4, 1)]
    run.drain()


def test_new_sequences_fill_holes_before_anyone_moves():
    run = Run(max_running=8, max_rows=8, token_budget=100, buckets=(2, 4, 8), num_pages=99)
    sequences = [run.add(prompt(3, i), 60) for i in range(5)]
    run.plan()
    run.end(sequences[0])
    new = run.add(prompt(3, 9), 60)
    plan = run.plan()
    assert new.slot == 0
    assert plan.moves == []


def test_reset_starts_everything_again():
    run = Run(windows=(None, 5))
    sequences = [run.add(prompt(6, i), 9) for i in range(3)]
    run.plan()
    run.reset()
    assert all(s.phase is Phase.WAITING and not s.in_flight for s in sequences)
    assert run.pages.pools[0].num_cached == 0
    run.drain()


def test_nobody_starves_behind_a_stream_of_urgent_requests():
    run = Run(max_running=2, max_rows=2, num_pages=12)
    patient = run.add(prompt(6), 4, order=3)
    for arrival in range(1, 30):
        run.add(prompt(6, arrival), 2, order=arrival)
        settle(run)
    assert patient.phase is Phase.FINISHED
    run.drain()


def steady(num_running, num_waiting):
    """Return the operations of one plan of decoding sequences while others wait."""
    run = Run(
        max_running=num_running,
        max_rows=num_running,
        token_budget=10_000,
        row_tokens=4,
        num_pages=10_000,
    )
    for i in range(num_running + num_waiting):
        run.add([i % 20 + 1] * 3, 90)
    assert len(run.scheduler.plan().decode) == num_running
    before = run.scheduler.operations
    for _ in range(4):
        assert len(run.scheduler.plan().decode) == num_running
    return run.scheduler.operations - before


def test_work_is_linear_in_running_and_independent_of_waiting():
    small, large = steady(64, 10), steady(256, 10)
    assert steady(256, 10_000) == large
    assert large <= 4 * small
    assert large <= 4 * 256 * 2


def test_work_of_a_blocked_queue_is_independent_of_its_length():
    counts = []
    for num_waiting in (10, 10_000):
        run = Run(num_pages=6)
        for i in range(num_waiting):
            run.add(prompt(14, i), 4)
        run.scheduler.plan()
        before = run.scheduler.operations
        run.scheduler.plan()
        counts.append(run.scheduler.operations - before)
    assert counts[0] == counts[1] < 20


def test_aborted_waiting_sequences_do_not_pile_up():
    run = Run(max_running=1)
    run.add(prompt(4), 50)
    run.plan()
    for i in range(500):
        run.scheduler.abort(run.add(prompt(4, i), 4))
        run.spoiled.add(run.alive[-1])
    run.check()
    assert len(run.scheduler._waiting._heap) < 100
