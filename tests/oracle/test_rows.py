"""What a row of the decode state takes along: to its neighbours, to another slot, into a resume."""

import pytest
from house import House
from rig import make_rig
from test_scenarios import sequence_of, step_until, wish


def test_rows_that_are_placed_together_keep_their_settings():
    house = House(make_rig(num_pages=60))
    kinds = [{"temperature": 0.0}, {"top_p": 0.5}, {"min_tokens": 8}, {"temperature": 0.5}]
    for seed, fields in enumerate(kinds):
        house.enter(wish(7, 3 + 3 * seed, seed=seed, **fields))
    house.run()


def test_rows_go_on_in_another_slot():
    house = House(make_rig((None, 6), num_pages=90, max_running=8, decode_steps=2))
    for seed in range(4):
        house.enter(wish(6, 3, seed=seed))
    last = house.enter(wish(6, 24, seed=9))
    step_until(house, lambda: sequence_of(house, last).slot == 4)
    step_until(house, lambda: sequence_of(house, last).slot == 0)
    house.run()


@pytest.mark.parametrize("drawn", [1, 3, 4, 6])
def test_forced_tokens_go_on_after_a_preemption(drawn):
    house = House(make_rig(num_pages=40, decode_steps=1))
    name = house.enter(wish(6, 12, forced_token_ids=(31, 32, 33, 34, 35, 36)))
    sequence = sequence_of(house, name)
    step_until(house, lambda: len(sequence.tokens) == 6 + drawn)
    house.accounts.scheduler.preempt(sequence)
    house.run()
