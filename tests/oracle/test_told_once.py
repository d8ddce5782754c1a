"""An interrupt while results are taken in: what was collected and not told is told once."""

from house import House
from rig import Wish, make_rig
from test_faults import SETTINGS, run_through

from inferjax.sampling import SamplingParams


def test_interrupts_while_results_are_taken_in():
    interrupts = 0
    for tick in range(1, 45, 2):
        house = House(make_rig((None, 6), **SETTINGS), gaps=True)
        for seed in range(3):
            sampling = SamplingParams(max_tokens=9, seed=seed, ignore_eos=True)
            house.enter(Wish((5, 6, 7), sampling))
        clock = house.rig.engine._clock
        clock.alarm = clock.now + tick
        interrupts += run_through(house, KeyboardInterrupt)
    assert interrupts > 10
