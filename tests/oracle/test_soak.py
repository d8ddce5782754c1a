"""Random traffic: every surviving token right, every account balanced after every step."""

import jaxtyping
import pytest
from rig import make_rig
from soak import Soak

# The pool holds hardly more than the longest sequence: preemption and eviction all the time.
TINY = {
    "num_pages": 20,
    "max_len": 60,
    "max_running": 8,
    "decode_steps": 3,
    "token_budget": 16,
    "priority_window": 20,
    "max_logprobs": 3,
}


@pytest.fixture
def unchecked():
    """Leave out the checks of argument types, which take four fifths of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
def test_soak_of_2000_requests():
    rig = make_rig((None, 6), **TINY)
    outcome = Soak(rig, num_requests=2000, seed=1).run()
    assert outcome.preemptions > 100
    assert outcome.hit_tokens > 5000
    for place in ("waiting", "prefill", "decode", "in flight"):
        assert outcome.aborted[place] > 20


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
    "page of one": ((None, 6), {"page_size": 1, "num_pages": 70}),
    "page of sixteen": ((None, 6), {"page_size": 16, "num_pages": 8}),
    "pool of one sequence": ((None, 6), {"num_pages": 16}),
    "room for all": ((None, 6), {"num_pages": 200, "max_running": 12}),
    "eager device": ((None, 6), {"depth": 0}),
    "lazy device": ((None, 6), {"depth": 9}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", VARIANTS)
def test_soak_of_variant(name):
    windows, settings = VARIANTS[name]
    rig = make_rig(windows, **{**TINY, **settings})
    Soak(rig, num_requests=60, seed=2).run()


@pytest.mark.usefixtures("unchecked")
def test_soak_with_a_device_that_fails():
    rig = make_rig((None, 6), **TINY)
    Soak(rig, num_requests=150, seed=3, fault_share=0.05).run()
    assert rig.engine.stats().totals.recoveries > 10


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(20))
def test_soak_of_100_000_requests(seed):
    """5,000 requests for each of 20 seeds, every one through another variant."""
    windows, settings = VARIANTS[list(VARIANTS)[seed % len(VARIANTS)]]
    rig = make_rig(windows, seed=seed, **{**TINY, **settings})
    Soak(rig, num_requests=5000, seed=100 + seed).run()
