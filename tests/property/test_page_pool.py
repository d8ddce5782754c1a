"""The page pool against the plainest model of it: a dictionary per page."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferjax.errors import PageError
from inferjax.kv.eviction import LRU
from inferjax.kv.pool import PagePool

NUM_PAGES = 5
PAGES = st.integers(-1, NUM_PAGES)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES, LRU())
        self.holders = {page: 0 for page in range(1, NUM_PAGES)}
        self.digests = {}
        self.cached = OrderedDict()

    @rule()
    def take(self):
        free = [p for p in self.holders if not self.holders[p] and p not in self.cached]
        if not free and not self.cached:
            with pytest.raises(PageError):
                self.pool.take()
            return
        page = self.pool.take()
        if free:
            assert page in free
        else:
            assert page == self.cached.popitem(last=False)[0]
            del self.digests[page]
        self.holders[page] = 1

    @rule(page=PAGES)
    def hold(self, page):
        if not self.holders.get(page) and page not in self.cached:
            with pytest.raises(PageError):
                self.pool.hold(page)
            return
        self.pool.hold(page)
        self.cached.pop(page, None)
        self.holders[page] += 1

    @rule(page=PAGES)
    def give(self, page):
        if not self.holders.get(page):
            with pytest.raises(PageError):
                self.pool.give(page)
            return
        self.pool.give(page)
        self.holders[page] -= 1
        if not self.holders[page] and page in self.digests:
            self.cached[page] = None

    @rule(page=PAGES, digest=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, page, digest):
        fresh = page not in self.digests and digest not in self.digests.values()
        if not self.holders.get(page) or not fresh:
            with pytest.raises(PageError):
                self.pool.register(page, digest)
            return
        self.pool.register(page, digest)
        self.digests[page] = digest

    @rule(page=st.integers(1, NUM_PAGES - 1))
    def forget(self, page):
        self.pool.forget(page)
        self.digests.pop(page, None)
        self.cached.pop(page, None)

    @precondition(lambda self: len(self.digests) > 2)
    @rule()
    def reset(self):
        self.pool.reset()
        self.holders = dict.fromkeys(self.holders, 0)
        self.digests.clear()
        self.cached.clear()

    @invariant()
    def agrees(self):
        self.pool.check()
        live = sum(1 for count in self.holders.values() if count)
        assert self.pool.num_live == live
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == NUM_PAGES - 1 - live - len(self.cached)
        assert self.pool.num_available == NUM_PAGES - 1 - live
        for page, count in self.holders.items():
            assert self.pool.holders(page) == count
            assert self.pool.is_registered(page) == (page in self.digests)
        for digest in (b"a", b"b", b"c"):
            found = [p for p, d in self.digests.items() if d == digest]
            assert self.pool.find(digest) == (found[0] if found else None)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_agrees_with_its_model = PoolMachine.TestCase
