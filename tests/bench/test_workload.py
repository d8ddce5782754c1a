import dataclasses

import numpy as np
import pytest

from inferjax.bench.workload import Ask, Mix, arrival_times, draw_asks, read_asks
from inferjax.errors import InvalidInput

VOCAB = 100


def test_lengths_are_exact_without_a_range():
    asks = draw_asks(Mix(num_requests=5, input_len=7, output_len=3), VOCAB)
    assert [(len(ask.prompt), ask.num_tokens) for ask in asks] == [(7, 3)] * 5
    assert all(0 <= token < VOCAB for ask in asks for token in ask.prompt)


def test_lengths_spread_over_the_whole_range_and_no_further():
    asks = draw_asks(Mix(num_requests=300, input_len=10, output_len=5, range_ratio=0.4), VOCAB)
    assert {len(ask.prompt) for ask in asks} == set(range(6, 15))
    assert {ask.num_tokens for ask in asks} == set(range(3, 8))


def test_request_depends_on_seed_and_place_only():
    mix = Mix(num_requests=8, range_ratio=0.5)
    asks = draw_asks(mix, VOCAB)
    assert draw_asks(dataclasses.replace(mix, num_requests=3), VOCAB) == asks[:3]
    assert draw_asks(dataclasses.replace(mix, seed=1), VOCAB) != asks
    assert len({ask.prompt for ask in asks}) == 8


def test_shared_prefixes_come_in_turn_before_tokens_of_their_own():
    mix = Mix(num_requests=6, input_len=4, shared_prefix=9, num_prefixes=2)
    prompts = [ask.prompt for ask in draw_asks(mix, VOCAB)]
    assert {len(prompt) for prompt in prompts} == {13}
    assert len({prompt[:9] for prompt in prompts}) == 2
    assert prompts[0][:9] == prompts[2][:9] != prompts[1][:9]
    assert len({prompt[9:] for prompt in prompts}) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests": 0},
        {"input_len": 0},
        {"output_len": 0},
        {"range_ratio": 1.0},
        {"range_ratio": -0.1},
        {"range_ratio": float("nan")},
        {"shared_prefix": -1},
        {"num_prefixes": 0},
        {"seed": -1},
    ],
    ids=str,
)
def test_mix_that_cannot_be_drawn_is_refused(changes):
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        Mix(**changes)


def test_arrivals_without_a_rate_are_at_once():
    assert arrival_times(3, None, 0) == [0.0] * 3


def test_arrivals_are_a_poisson_process():
    times = np.array(arrival_times(4000, 5.0, 0))
    gaps = np.diff(times, prepend=0.0)
    assert (gaps > 0).all()
    # Gaps of an exponential distribution have their mean as standard deviation.
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)
    assert arrival_times(5, 5.0, 0) == times[:5].tolist()
    assert arrival_times(5, 5.0, 1) != times[:5].tolist()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_arrivals_of_no_rate_are_refused(rate):
    with pytest.raises(InvalidInput, match="request rate"):
        arrival_times(3, rate, 0)


def test_file_gives_prompts_and_lengths(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "hé", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n{"prompt": "c"}\n')
    asks = [Ask(prompt="hé", num_tokens=3), Ask(prompt=(1, 2), num_tokens=9)]
    assert read_asks(path, num_tokens=9, limit=2) == asks
    assert len(read_asks(path, num_tokens=9)) == 3


def test_separators_inside_a_prompt_end_no_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_asks(path, num_tokens=1) == [Ask(prompt="a\u2028b\x85c", num_tokens=1)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1]",
        "{}",
        '{"prompt": 3}',
        '{"prompt": ["a"]}',
        '{"prompt": [true]}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": true}',
    ],
)
def test_file_with_a_bad_line_is_refused(tmp_path, line):
    path = tmp_path / "in.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidInput, match=r"in\.jsonl"):
        read_asks(path, num_tokens=1)


def test_file_that_is_not_there_is_explained(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_asks(tmp_path / "none.jsonl", num_tokens=1)
