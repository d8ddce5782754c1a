"""What the prefix cache must not find."""

from house import House
from rig import Wish, make_rig
from test_scenarios import PROMPT, wish

from inferjax.sampling import SamplingParams


def test_page_is_not_found_at_another_place():
    """The same tokens, but after none instead of four."""
    house = House(make_rig(num_pages=60))
    settings = SamplingParams(max_tokens=4, seed=1)
    for prompt in (PROMPT[:13], PROMPT[4:17]):
        name = house.enter(Wish(prompt, settings))
        house.run()
        assert house.completions[name].usage.cached_tokens == 0


def test_page_of_old_weights_is_not_found():
    rig = make_rig(num_pages=60)
    house = House(rig)
    for _ in range(2):
        name = house.enter(wish(13))
        house.run()
        assert house.completions[name].usage.cached_tokens == 0
        # Hashes have no weights; these only stand for new ones.
        rig.engine.update_params(rig.oracle.params)
