"""Random traffic: every surviving token right, every account balanced after every step."""

import pytest
from rig import make_rig
from soak import Soak

# A pool of a few sequences: preemption and eviction all the time.
TINY = {"num_pages": 24, "max_len": 80, "priority_window": 20}


def test_soak_of_2000_requests():
    rig = make_rig((None, 6, None), max_running=6, decode_steps=4, **TINY)
    outcome = Soak(rig, num_requests=2000, seed=1, crowd=14).run()
    print(outcome)
    assert outcome.preemptions > 100


VARIANTS = {
    "one full group": ((None, None), {}),
    "sliding only": ((6, 6), {}),
    "two windows": ((None, 4, 9), {}),
    "window of one": ((None, 1), {}),
    "no prefix cache": ((None, 6), {"prefix_caching": False}),
    "no overlap": ((None, 6), {"overlap": False}),
    "one at a time": ((None, 6), {"max_running": 1}),
    "narrow rows": ((None, 6), {"row_tokens": 3, "token_budget": 7}),
    "one row": ((None, 6), {"row_tokens": 8, "token_budget": 8}),
    "single steps": ((None, 6), {"decode_steps": 1}),
    "many steps": ((None, 6), {"decode_steps": 16}),
    "page of one": ((None, 6), {"page_size": 1, "num_pages": 90}),
    "page of sixteen": ((None, 6), {"page_size": 16, "num_pages": 8}),
    "pool of one sequence": ((None, 6), {"num_pages": 14}),
    "room for all": ((None, 6), {"num_pages": 200, "max_running": 12}),
    "eager device": ((None, 6), {"depth": 0}),
    "lazy device": ((None, 6), {"depth": 9}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_soak_of_variant(name):
    windows, settings = VARIANTS[name]
    rig = make_rig(windows, **{**TINY, "decode_steps": 4, **settings})
    Soak(rig, num_requests=60, seed=2).run()
