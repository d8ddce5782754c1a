import pytest

from inferjax.kv.eviction import EVICTIONS
from inferjax.kv.pool import PagePool


def test_lru_gives_up_the_page_that_came_first():
    lru = EVICTIONS["lru"]()
    for page in (3, 1, 2):
        lru.add(page)
    lru.remove(1)
    lru.add(1)
    assert [lru.pop() for _ in range(len(lru))] == [3, 2, 1]


@pytest.mark.parametrize("name", EVICTIONS)
def test_every_policy_gives_out_each_page_once(name):
    policy = EVICTIONS[name]()
    for page in range(10):
        policy.add(page)
    policy.remove(4)
    assert sorted(policy.pop() for _ in range(len(policy))) == [p for p in range(10) if p != 4]
    assert len(policy) == 0


def test_page_zero_is_never_given_out():
    pool = PagePool(4, EVICTIONS["lru"]())
    assert sorted(pool.take() for _ in range(pool.num_available)) == [1, 2, 3]


def test_free_pages_go_before_cached_ones():
    pool = PagePool(3, EVICTIONS["lru"]())
    page = pool.take()
    pool.register(page, b"x")
    pool.give(page)
    assert pool.take() != page
    assert pool.find(b"x") == page
    assert pool.take() == page
    assert pool.find(b"x") is None
