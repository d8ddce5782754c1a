"""Mutated checkpoints: whatever a file says, reading succeeds or raises an InferjaxError, soon.

Cases run in a process of their own, so that a crash or a hang of native code is a failure that
names its case. `python mutation_runs.py gguf,config 10000` counts what comes of many.
"""

import pytest
from mutated_checkpoints import TARGETS
from mutation_runs import Tally, Worker, run_cases

NUM_CASES, NUM_SLOW_CASES = 30, 10_000
MAX_SECONDS = 5.0  # of processor time to open one; the slowest of 110,000 took less than one
# Beyond twice the files' size: threads, and what the C library keeps.
MAX_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.stop()


def check(tally: Tally) -> None:
    assert tally.failures == []
    assert tally.slowest_s < MAX_SECONDS
    assert tally.most_bytes < MAX_BYTES


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_file_opens_or_is_refused_with_our_error(worker, target):
    tally = run_cases(worker, target, NUM_CASES)
    check(tally)
    assert tally.outcomes.total() == NUM_CASES
    assert tally.outcomes["loaded"] < NUM_CASES


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_ten_thousand_mutated_files_open_or_are_refused(worker, target):
    tally = run_cases(worker, target, NUM_SLOW_CASES, first=NUM_CASES)
    check(tally)
    assert tally.outcomes["loaded"] > 0


def test_crash_and_hang_are_seen(monkeypatch):
    """The harness itself: a process that ends, and one that does not answer."""
    worker = Worker()
    answer = worker.run("no_such_kind", 0)
    assert answer["outcome"] == "crash"
    assert "KeyError" in answer["detail"]
    monkeypatch.setattr("mutation_runs.MAX_SECONDS", 0.0)
    assert worker.run("gguf_types", 0)["outcome"] == "hang"
    worker.stop()
