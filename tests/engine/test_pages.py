import pytest

from inferjax.engine.pages import SequencePages
from inferjax.engine.plan import Copy
from inferjax.engine.sequence import Sequence
from inferjax.errors import PageError
from inferjax.kv.eviction import LRU
from inferjax.kv.pool import PagePool

S = 4


def make_pages(*windows, num_pages=40, prefix_caching=True):
    pools = [PagePool(num_pages, LRU()) for _ in windows]
    return SequencePages(pools, windows, S, prefix_caching)


def make_sequence(num_tokens, uid=0, first=0):
    tokens = list(range(first, first + num_tokens))
    return Sequence(uid=uid, tokens=tokens, prompt_len=num_tokens, max_len=100, order=uid)


def filled(pages, sequence):
    """Attach nothing, take pages for all tokens, register them."""
    pages.attach(sequence, 0)
    assert pages.grow(sequence, len(sequence.tokens))
    pages.register(sequence, len(sequence.tokens))
    return sequence


def sees(window, query, page):
    """Return whether a query sees any position of a page, straight from the definition."""
    return any(query - window < p <= query for p in range(page * S, (page + 1) * S))


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("query", range(13))
def test_trim_keeps_exactly_what_the_query_sees(window, query):
    pages = make_pages(None, window)
    sequence = filled(pages, make_sequence(16))
    pages.trim(sequence, query)
    pages.trim(sequence, query)
    kept = [page for page in range(4) if sequence.pages[1][page]]
    assert kept == [p for p in range(4) if p * S > query or sees(window, query, p)]
    assert all(sequence.pages[0])
    assert pages.pools[1].num_live == len(kept)


@pytest.mark.parametrize(("query", "num_dead"), [(8, 0), (9, 0), (10, 0), (11, 1), (12, 1)])
def test_page_dies_when_its_last_position_leaves_the_window(query, num_dead):
    # Position 3, the last of page 0, is seen by a window of 8 up to the query at 10.
    pages = make_pages(8)
    sequence = filled(pages, make_sequence(16))
    pages.trim(sequence, query)
    assert sequence.pages[0].count(0) == num_dead


def test_grow_takes_all_or_nothing():
    pages = SequencePages([PagePool(10, LRU()), PagePool(3, LRU())], (None, None), S)
    sequence = make_sequence(20)
    pages.attach(sequence, 0)
    assert not pages.grow(sequence, 9)
    assert sequence.pages == ([], [])
    assert pages.grow(sequence, 8)
    assert [len(table) for table in sequence.pages] == [2, 2]


@pytest.mark.parametrize("limit", range(20))
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
def test_match_returns_the_longest_full_pages_within_the_limit(windows, limit):
    pages = make_pages(*windows)
    filled(pages, make_sequence(18))
    assert pages.match(make_sequence(19, uid=1), limit) == min(limit // S, 4)


def test_match_stops_where_prompts_part():
    pages = make_pages(None)
    filled(pages, make_sequence(16))
    other = make_sequence(16, uid=1)
    other.tokens[9] = 99
    assert pages.match(other, 15) == 2
    other = make_sequence(16, uid=1)
    other.root = b"another adapter"
    assert pages.match(other, 15) == 0


@pytest.mark.parametrize(
    ("lost", "window", "expected"),
    [
        ([], 8, 4),
        ([0], 8, 4),
        ([0, 1], 8, 4),
        ([2], 8, 2),
        ([3], 8, 3),
        ([1], 8, 4),
        ([1, 3], 8, 1),
        ([0, 1, 2], 5, 4),
        ([0, 1, 2], 6, 0),
    ],
)
def test_match_needs_only_the_window_of_a_sliding_group(lost, window, expected):
    # The query at 16 sees from 16 - window + 1 on: pages 2 and 3 for a window of 8.
    pages = make_pages(window)
    sequence = filled(pages, make_sequence(16))
    for page in lost:
        pages.pools[0].forget(sequence.pages[0][page])
    assert pages.match(make_sequence(17, uid=1), 16) == expected


def test_attached_pages_are_held_and_those_behind_the_window_are_not():
    pages = make_pages(None, 6)
    first = filled(pages, make_sequence(16))
    second = make_sequence(17, uid=1)
    pages.attach(second, pages.match(second, 16))
    assert second.pages == (first.pages[0], [0, 0, *first.pages[1][2:]])
    assert second.computed == 16
    assert [pages.pools[1].holders(p) for p in first.pages[1]] == [1, 1, 2, 2]


def test_tail_is_evicted_first():
    pages = make_pages(None, num_pages=5)
    pages.release(filled(pages, make_sequence(16)))
    assert pages.pools[0].num_cached == 4
    filled(pages, make_sequence(4, uid=1, first=50))
    assert pages.match(make_sequence(17, uid=2), 16) == 3


def test_release_twice_does_no_harm():
    pages = make_pages(None, 3)
    sequence = filled(pages, make_sequence(9))
    pages.release(sequence)
    pages.release(sequence)
    pages.check()
    assert [pool.num_live for pool in pages.pools] == [0, 0]


def test_register_keeps_the_first_page_with_the_same_contents():
    pages = make_pages(None)
    first, second = filled(pages, make_sequence(8)), filled(pages, make_sequence(8, uid=1))
    assert not any(pages.pools[0].is_registered(p) for p in second.pages[0])
    pages.release(second)
    assert pages.pools[0].num_cached == 0
    pages.release(first)
    assert pages.pools[0].num_cached == 2


def test_register_costs_what_is_new():
    pages = make_pages(None, num_pages=600)
    sequence = filled(pages, make_sequence(2000))
    before = pages.operations
    sequence.tokens += [1] * 4
    pages.grow(sequence, 2004)
    for _ in range(100):
        pages.register(sequence, 2004)
    assert pages.operations - before <= 3


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12, 15])
def test_fork_shares_full_pages_and_copies_the_rest(length):
    pages = make_pages(None, 5)
    leader, child = filled(pages, make_sequence(16)), make_sequence(16, uid=1)
    copies = pages.fork(leader, child, length)
    full, rest = divmod(length, S)
    assert child.pages[0][:full] == leader.pages[0][:full]
    targets = [Copy(group=g, source=leader.pages[g][full], target=child.pages[g][full])
               for g in range(2 if rest else 0)]  # fmt: skip
    assert copies == targets
    assert all(copy.source != copy.target for copy in targets)
    assert child.computed == length
    pages.release(leader)
    pages.release(child)
    pages.check()
    assert [pool.num_live for pool in pages.pools] == [0, 0]


def test_fork_is_refused_when_the_window_has_left_a_page():
    pages = make_pages(None, 5)
    leader, child = filled(pages, make_sequence(24)), make_sequence(24, uid=1)
    pages.trim(leader, 16)
    assert pages.fork(leader, child, 15) is None
    assert pages.fork(leader, child, 16) == []
    assert pages.fork(make_sequence(8, uid=2), make_sequence(8, uid=3), 7) is None


def test_without_prefix_caching_nothing_is_found():
    pages = make_pages(None, prefix_caching=False)
    pages.release(filled(pages, make_sequence(16)))
    assert pages.match(make_sequence(16, uid=1), 15) == 0
    assert pages.pools[0].num_cached == 0


@pytest.mark.parametrize(("num_tokens", "never"), [(36, False), (37, True)])
def test_full_group_must_hold_all_tokens(num_tokens, never):
    assert make_pages(None, num_pages=10).never_fits(num_tokens, span=8) == never


@pytest.mark.parametrize(("num_pages", "never"), [(4, True), (5, False)])
def test_sliding_group_must_hold_a_window_and_a_span(num_pages, never):
    # 6 - 1 + 8 neighbouring tokens touch at most 4 pages.
    pages = make_pages(6, num_pages=num_pages)
    assert pages.never_fits(1000, span=8) == never


def test_misuse_of_the_pool_is_an_error():
    pool = PagePool(2, LRU())
    page = pool.take()
    pool.give(page)
    with pytest.raises(PageError, match="nobody holds"):
        pool.give(page)
    with pytest.raises(PageError, match="free"):
        pool.hold(page)
