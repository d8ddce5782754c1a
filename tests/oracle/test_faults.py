"""Exceptions inside a step: the engine starts over, and its users notice nothing else."""

import sys

import numpy as np
import pytest
from house import House
from rig import Wish, make_rig
from soak import Traffic

from inferjax.sampling import SamplingParams

SETTINGS = {"num_pages": 24, "max_len": 60, "decode_steps": 3, "priority_window": 20}


def full_house(seed=0, gaps=False, **settings):
    rig = make_rig((None, 6), **{**SETTINGS, **settings})
    house, traffic = House(rig, gaps=gaps), Traffic(rig, seed)
    for _ in range(6):
        house.enter(traffic.wish())
    return house


def run_through(house, kinds, most=400):
    """Step to the end; return how many exceptions came out."""
    count = 0
    while house.rig.engine.has_work:
        try:
            house.step()
        except kinds:
            count += 1
            house.num_steps += 1
        assert house.num_steps < most
    assert not house.guests
    house.accounts.check_end()
    return count


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(0, 12, 2))
def test_failed_dispatch(kind, overlap, at):
    house = full_house(overlap=overlap)
    house.rig.oracle.faults[at] = kind("gone")
    assert run_through(house, kind) == 1
    assert house.rig.oracle.num_resets == 1
    assert house.rig.engine.stats().totals.recoveries == 1


@pytest.mark.parametrize("at", range(0, 12, 2))
def test_failed_read(at):
    house = full_house()
    house.rig.oracle.read_faults[at] = RuntimeError("gone")
    assert run_through(house, RuntimeError) == 1
    assert house.rig.oracle.num_resets == 1


def test_failure_after_failure():
    house = full_house()
    for at in range(0, 60, 3):
        house.rig.oracle.faults[at] = RuntimeError("gone")
    assert run_through(house, RuntimeError) > 5


def test_abort_after_a_failure():
    house = full_house()
    house.rig.oracle.faults[0] = RuntimeError("gone")
    with pytest.raises(RuntimeError):
        house.step()
    house.abort(next(iter(house.guests)))
    assert run_through(house, RuntimeError) == 0


def test_requests_enter_after_a_failure():
    house = full_house()
    house.rig.oracle.faults[0] = RuntimeError("gone")
    with pytest.raises(RuntimeError):
        house.step()
    house.enter(Wish((5, 6, 7), SamplingParams(max_tokens=9, seed=1)))
    assert run_through(house, RuntimeError) == 0


class Interrupt:
    """Raises KeyboardInterrupt at the `count`-th line that the engine runs inside `part` of a step.

    Lines of `step` itself are left out: what it has taken out of the outbox is the caller's.
    """

    def __init__(self, count: int, part: str = "step") -> None:
        self.left, self.part = count, part

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame, event, arg):
        code = frame.f_code
        ours = "/inferjax/engine/" in code.co_filename or "/inferjax/kv/" in code.co_filename
        return self._line if ours and code.co_name != "step" and self._inside(frame) else None

    def _inside(self, frame):
        """Return whether this is the engine at work, and not a check that calls a part of it."""
        while frame is not None:
            if (
                frame.f_code.co_name == self.part
                and "/inferjax/engine/" in frame.f_code.co_filename
            ):
                return True
            frame = frame.f_back
        return False

    def _line(self, frame, event, arg):
        self.left -= event == "line"
        if self.left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("seed", range(6))
def test_interrupt_at_any_line(seed):
    """Whatever the engine was doing, it goes on; no request is lost and no token told twice."""
    random, house = np.random.default_rng(seed), full_house(seed, gaps=True)
    for _ in range(40):
        try:
            with Interrupt(int(random.integers(2000))):
                house.step()
        except KeyboardInterrupt:
            continue
    assert house.rig.engine.stats().totals.recoveries > 5
    run_through(house, KeyboardInterrupt)


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_interrupt_at_every_line_that_takes_in_an_end(first):
    """Tokens that are reported have their end with them: nothing is drawn behind it."""
    for count in range(first, first + 60):
        house = House(make_rig(), gaps=True)
        house.enter(Wish((5, 6, 7), SamplingParams(max_tokens=1, seed=1)))
        try:
            with Interrupt(count, part="collect"):
                house.step()
        except KeyboardInterrupt:
            run_through(house, KeyboardInterrupt)
