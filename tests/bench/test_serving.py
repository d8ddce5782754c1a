import pytest
from engines import SMALL, shared_engine
from made_up import EXEC, FakeClock, failed, served
from tiny_models import tiny_model

import inferjax as ij
from inferjax.bench.serving import latencies, meets, parse_goals, serve
from inferjax.bench.workload import Ask
from inferjax.errors import InvalidInput, RequestTooLong

ASKS = [Ask(prompt=(5 + i, 6, 7), num_tokens=n) for i, n in enumerate([3, 1, 4, 2])]


def test_times_are_those_of_the_one_who_waits():
    times = served(queue=0.1, prefill=0.2, gaps=(0.1, 0.3), late=0.5).times_ms
    expected = {"queue": 600, "prefill": 200, "ttft": 800, "tpot": 100, "e2el": 1200}
    assert times == pytest.approx(expected)
    assert times["ttft"] == pytest.approx(times["queue"] + times["prefill"])


def test_request_of_one_token_has_no_time_per_further_token():
    one = served(gaps=())
    assert "tpot" not in one.times_ms
    assert one.gaps_ms == []


def test_latencies_are_percentiles_over_requests_and_gaps():
    found = latencies([served(queue=0.0, prefill=i / 100, gaps=(0.1, 0.3)) for i in range(101)])
    assert found["ttft"] == pytest.approx({"mean": 500, "p50": 500, "p90": 900, "p99": 990})
    assert found["itl"] == pytest.approx({"mean": 200, "p50": 200, "p90": 300, "p99": 300})
    assert latencies([]) == {}


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 300.1, "tpot": 100.1, "e2el": 700.1}, True),
        ({"ttft": 299}, False),
        ({"tpot": 99}, False),
        ({"e2el": 699}, False),
        ({"ttft": 1000, "e2el": 699}, False),
    ],
)
def test_goodput_counts_requests_within_all_limits(goals, good):
    assert meets(served(), goals) is good
    assert not meets(failed(), goals)
    assert meets(served(gaps=()), {"tpot": 0.001})


def test_goals_are_read_from_words():
    assert parse_goals(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}


@pytest.mark.parametrize(
    "words", [["itl:3"], ["ttft"], ["ttft:x"], ["ttft:0"], ["ttft:nan"], ["ttft:1", "ttft:2"]]
)
def test_goals_that_mean_nothing_are_refused(words):
    with pytest.raises(InvalidInput, match="goodput"):
        parse_goals(words)


def test_serve_runs_every_request_to_its_length():
    run = serve(shared_engine(), ASKS, [0.0] * 4, cache_salt="lengths")
    ends = {one.completion.prompt_ids: len(one.completion.token_ids) for one in run.served}
    assert ends == {ask.prompt: ask.num_tokens for ask in ASKS}
    assert run.counted.prompt_tokens == 12
    assert run.counted.generated_tokens == 10
    assert 1 < run.peak_live[0] <= 4


def test_serve_in_an_open_loop_waits_for_arrivals_and_counts_lateness():
    clock = FakeClock(step=0.01)
    engine = ij.Engine(tiny_model("llama"), SMALL, exec=EXEC, clock=clock)
    arrivals = [1.0, 1.0, 1.0, 50.0]
    run = serve(engine, ASKS, arrivals, clock=clock, sleep=clock.sleep)
    engine.close()
    by_prompt = {one.completion.prompt_ids: one for one in run.served}
    assert run.seconds > 50
    assert all(one.late_s > 0 for one in run.served)
    # It slept until the first arrival, and then until the last.
    assert len(clock.slept) == 2
    assert clock.slept[0] < 1 < 40 < clock.slept[1] < 49
    assert by_prompt[ASKS[3].prompt].times_ms["queue"] < 1000


def test_serve_in_a_closed_loop_keeps_to_the_concurrency():
    run = serve(shared_engine(), ASKS, [0.0] * 4, max_concurrency=1, cache_salt="closed")
    # One at a time, so they end in order, and nobody waits for a slot.
    assert [one.completion.prompt_ids for one in run.served] == [ask.prompt for ask in ASKS]
    assert run.peak_live == (1,)
    assert all(one.late_s == 0 for one in run.served)


def test_serve_refuses_a_request_that_does_not_fit():
    with pytest.raises(RequestTooLong):
        serve(shared_engine(), [Ask(prompt=(1,), num_tokens=96)], [0.0])
    assert not shared_engine().has_work
