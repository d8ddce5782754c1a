"""The pages of sequences in every cache group: finding, taking, sharing and giving back.

Tables are index-aligned: entry j of every group is the page of tokens [j * S, (j + 1) * S). Groups
differ only in which entries are 0, because a sliding window has left them. The query at position q
of a window of W sees positions above q - W.
"""

from collections.abc import Sequence as List

from inferjax.engine.plan import Copy, Shift
from inferjax.engine.sequence import Sequence
from inferjax.kv.pool import PagePool
from inferjax.kv.prefix import page_digests


class SequencePages:
    """Move sequences' pages in and out of one pool per cache group.

    `operations` counts pages looked at, taken and given, for tests of cost.
    """

    def __init__(
        self,
        pools: List[PagePool],
        windows: List[int | None],
        page_size: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pools = tuple(pools)
        self.windows = tuple(windows)
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.operations = 0

    def match(self, sequence: Sequence, limit: int) -> int:
        """Return how many leading full pages can come from the cache, n * S <= limit.

        A full group needs all of them, a sliding group only those that the query at n * S sees.
        """
        if not self.prefix_caching or limit < self.page_size:
            return 0
        count = limit // self.page_size
        self._extend_digests(sequence, count)
        best, runs = 0, [0] * len(self.pools)
        for page, digest in enumerate(sequence.digests[:count]):
            self.operations += 1
            usable = True
            for group, pool in enumerate(self.pools):
                runs[group] = runs[group] + 1 if pool.find(digest) is not None else 0
                first = self._first_page(group, (page + 1) * self.page_size)
                usable = usable and runs[group] > page - first
            if usable:
                best = page + 1
            elif self._hopeless(runs, page):
                break
        return best

    def attach(self, sequence: Sequence, num_hits: int) -> None:
        """Hold the first `num_hits` pages, which `match` has just found."""
        computed = num_hits * self.page_size
        tables = []
        for group, pool in enumerate(self.pools):
            first = self._first_page(group, computed)
            pages = [0] * first
            for digest in sequence.digests[first:num_hits]:
                page = pool.find(digest) or 0
                pool.hold(page)
                pages.append(page)
            self.operations += num_hits - first
            tables.append(pages)
        sequence.pages = tuple(tables)
        sequence.computed, sequence.registered = computed, num_hits
        sequence.table_changed = True

    def idle_hits(self, sequence: Sequence, num_hits: int) -> list[int]:
        """Return per group how many pages of a match nobody holds: attaching makes them live."""
        counts = []
        for group, pool in enumerate(self.pools):
            first = self._first_page(group, num_hits * self.page_size)
            found = [pool.find(digest) for digest in sequence.digests[first:num_hits]]
            counts.append(sum(1 for page in found if page and not pool.holders(page)))
            self.operations += len(found)
        return counts

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Take pages so that all positions below `upto` have one, or none if they do not fit."""
        count = -(-upto // self.page_size) - len(sequence.pages[0])
        if count <= 0:
            return True
        for pool in self.pools:
            if pool.num_available < count:
                return False
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            for _ in range(count):
                pages.append(pool.take())
        self.operations += count * len(self.pools)
        sequence.table_changed = True
        return True

    def trim(self, sequence: Sequence, oldest_query: int) -> None:
        """Give back pages of sliding groups that no query from `oldest_query` on will see.

        `oldest_query` must not be above the position of any query in a later dispatch, and work
        that is dispatched together with what takes the pages next counts as later. Page j is dead
        when (j + 1) * S - 1 <= oldest_query - W.
        """
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            pages = sequence.pages[group]
            page = min(self._first_page(group, oldest_query), len(pages)) - 1
            while page >= 0 and pages[page]:
                self.pools[group].give(pages[page])
                pages[page] = 0
                sequence.table_changed = True
                self.operations += 1
                page -= 1

    def register(self, sequence: Sequence, upto: int) -> None:
        """Make the full pages below `upto` findable, where their contents are not yet."""
        count = min(upto, len(sequence.tokens)) // self.page_size
        if not self.prefix_caching or sequence.spliced or count <= sequence.registered:
            return
        self._extend_digests(sequence, count)
        for j in range(sequence.registered, count):
            digest = sequence.digests[j]
            for pool, pages in zip(self.pools, sequence.pages, strict=True):
                if pages[j] and pool.find(digest) is None:
                    pool.register(pages[j], digest)
            self.operations += 1
        sequence.registered = count

    def can_fork(self, leader: Sequence, length: int) -> bool:
        """Return whether the leader still has all pages that a query at `length` sees."""
        stop = -(-length // self.page_size)
        for group, pages in enumerate(leader.pages):
            first = self._first_page(group, length)
            if len(pages) < stop or not all(pages[first:stop]):
                return False
            self.operations += stop - first
        return bool(leader.pages)

    def fork(self, leader: Sequence, child: Sequence, length: int) -> list[Copy] | None:
        """Share the leader's first `length` tokens; return the copies, or None if they are gone.

        Full pages get one more holder. A partly filled one is copied to a new page, since both
        will write to it.

        Raises: PageError when a group has no page for the copy.
        """
        if not self.can_fork(leader, length):
            return None
        full, rest = divmod(length, self.page_size)
        copies, tables = [], []
        for group, (pool, source) in enumerate(zip(self.pools, leader.pages, strict=True)):
            first = self._first_page(group, length)
            pages = [0] * first + source[first:full]
            for page in pages[first:]:
                pool.hold(page)
            if rest:
                pages.append(pool.take())
                copies.append(Copy(group=group, source=source[full], target=pages[full]))
            self.operations += len(pages) - first
            tables.append(pages)
        child.pages = tuple(tables)
        child.computed, child.registered = length, full
        child.table_changed = True
        return copies

    def can_splice(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Return whether there are new pages for those behind `stop` that others hold too."""
        first, last = start // self.page_size, stop // self.page_size
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            gained = sum(1 for page in pages[first:last] if page and pool.holders(page) == 1)
            shared = sum(1 for page in pages[last:] if page and pool.holders(page) > 1)
            self.operations += len(pages) - first
            if shared > pool.num_available + gained:
                return False
        return True

    def splice(self, sequence: Sequence, start: int, stop: int) -> Shift:
        """Take the pages of tokens [start, stop) out of a sequence; those behind are rewritten.

        A page that others hold stays theirs, and another one takes its place. What is rewritten can
        no longer be found.

        Raises: PageError when a group has no page; ask `can_splice` first.
        """
        first, last = start // self.page_size, stop // self.page_size
        sources, targets = [], []
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            for page in reversed(pages[first:last]):
                if page:
                    pool.give(page)
            sources.append(pages[last:])
            targets.append([_own(pool, page) for page in pages[last:]])
            self.operations += len(pages) - first
            pages[first:] = targets[-1]
        sequence.computed -= stop - start
        sequence.spliced = sequence.table_changed = True
        return Shift(sources=tuple(sources), targets=tuple(targets))

    def release(self, sequence: Sequence) -> None:
        """Give all pages back, the last ones first; twice does no harm."""
        for pool, pages in zip(self.pools, sequence.pages, strict=False):
            for page in reversed(pages):
                if page:
                    pool.give(page)
            self.operations += len(pages)
        sequence.pages = ()
        sequence.computed = sequence.registered = 0
        sequence.spliced, sequence.table_changed = False, True

    def fresh(self, num_pages: int, computed: int, upto: int, span: int) -> list[int]:
        """Return per group how many pages beyond its first `num_pages` a sequence has yet to take.

        `computed` tokens are in the cache, and positions below `upto` follow, at most `span` of
        them in a dispatch. A sliding group only ever holds those that a window and a span touch.
        """
        total = -(-upto // self.page_size)
        counts = []
        for group, window in enumerate(self.windows):
            first = self._first_page(group, computed)
            most = total - first
            if window is not None:
                most = min(most, self._touched(window - 1 + span))
            counts.append(max(0, most - (num_pages - first)))
        return counts

    def never_fits(self, num_tokens: int, span: int) -> bool:
        """Return whether a sequence of so many tokens does not even fit alone."""
        counts = self.fresh(0, 0, num_tokens, span)
        return any(n >= pool.num_pages for n, pool in zip(counts, self.pools, strict=True))

    def reset(self) -> None:
        """Make all pages free and forget all contents, whatever tables say."""
        for pool in self.pools:
            pool.reset()

    def check(self) -> None:
        """Verify the accounts of every pool.

        Raises: PageError.
        """
        for pool in self.pools:
            pool.check()

    def _first_page(self, group: int, query: int) -> int:
        """Return the first page that the query at a position sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, query - window + 1) // self.page_size

    def _touched(self, num_tokens: int) -> int:
        """Return how many pages so many neighbouring tokens touch at most."""
        return (num_tokens + self.page_size - 2) // self.page_size + 1

    def _hopeless(self, runs: list[int], page: int) -> bool:
        """Return whether a full group misses a page, so that no longer prefix can match."""
        pairs = zip(runs, self.windows, strict=True)
        return any(window is None and run <= page for run, window in pairs)

    def _extend_digests(self, sequence: Sequence, count: int) -> None:
        page_digests(sequence.root, sequence.tokens, self.page_size, sequence.digests, count)


def _own(pool: PagePool, page: int) -> int:
    """Return a page that one sequence alone holds and nobody finds: this one or another."""
    if not page:
        return 0
    if pool.holders(page) == 1:
        pool.forget(page)
        return page
    own = pool.take()
    pool.give(page)
    return own
