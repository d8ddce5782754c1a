"""Who holds which page of one cache group, and which pages hold contents worth finding again.

Every page but the first is in one of three states. Free: nobody holds it. Live: at least one
sequence holds it. Cached: nobody holds it, but its contents are registered under a digest, so that
it can be held again, or taken when no page is free.
"""

from inferjax.errors import PageError
from inferjax.kv.eviction import Eviction


class PagePool:
    """Account for pages 1 to `num_pages` - 1; page 0 is trash and is never given out."""

    def __init__(self, num_pages: int, eviction: Eviction) -> None:
        self.num_pages = num_pages
        self._eviction = eviction
        self._holders = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and whose contents are worthless."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose contents can be found."""
        return len(self._eviction)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give out: free and cached."""
        return len(self._free) + len(self._eviction)

    @property
    def num_live(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - 1 - self.num_available

    def holders(self, page: int) -> int:
        """Return how many hold a page."""
        return self._holders[page]

    def take(self) -> int:
        """Return a page with one holder: a free one, or the cached one that is missed least.

        Raises: PageError when every page is live; ask `num_available` first.
        """
        if self._free:
            page = self._free.pop()
        elif len(self._eviction):
            page = self._eviction.pop()
            self._unregister(page)
        else:
            raise PageError("no page is left to take", why=f"all {self.num_live} pages are live")
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a live or cached page.

        Raises: PageError.
        """
        if not self._known(page) or not (self._holders[page] or self._digests[page]):
            raise PageError(f"page {page} is held though it is free or does not exist")
        if not self._holders[page]:
            self._eviction.remove(page)
        self._holders[page] += 1

    def give(self, page: int) -> None:
        """Remove a holder; without any, a registered page is cached and another one free.

        Give a sequence's pages from its end to its beginning: the tail is then evicted first, and
        what is left is a prefix that can be found.

        Raises: PageError.
        """
        if not self._known(page) or not self._holders[page]:
            raise PageError(f"page {page} is given back though nobody holds it")
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._digests[page] is None:
            self._free.append(page)
        else:
            self._eviction.add(page)

    def register(self, page: int, digest: bytes) -> None:
        """Make a live page's contents findable.

        Raises: PageError when the page is not live, or page or digest are registered already.
        """
        if not self._known(page) or not self._holders[page]:
            raise PageError(f"page {page} is registered though nobody holds it")
        if self._digests[page] is not None or digest in self._index:
            raise PageError(f"page {page} or its digest is registered twice")
        self._digests[page] = digest
        self._index[digest] = page

    def find(self, digest: bytes) -> int | None:
        """Return the page with these contents, live or cached, or None."""
        return self._index.get(digest)

    def is_registered(self, page: int) -> bool:
        """Return whether a page's contents can be found."""
        return self._digests[page] is not None

    def forget(self, page: int) -> None:
        """Make a page's contents unfindable; a cached page becomes free."""
        if self._digests[page] is None:
            return
        self._unregister(page)
        if not self._holders[page]:
            self._eviction.remove(page)
            self._free.append(page)

    def reset(self) -> None:
        """Make every page free, whoever holds it."""
        while len(self._eviction):
            self._eviction.pop()
        self._holders = [0] * self.num_pages
        self._digests = [None] * self.num_pages
        self._index.clear()
        self._free = list(range(self.num_pages - 1, 0, -1))

    def check(self) -> None:
        """Verify that every page is in exactly one state, in time linear in the pool.

        Raises: PageError.
        """
        held = [page for page, count in enumerate(self._holders) if count]
        idle = [page for page in self._index.values() if not self._holders[page]]
        if sorted(held + idle + self._free) != list(range(1, self.num_pages)):
            raise PageError("a page is in no state or in two")
        if len(idle) != len(self._eviction):
            raise PageError(f"{len(self._eviction)} pages can be evicted, {len(idle)} are cached")
        found = {page: digest for digest, page in self._index.items()}
        if found != {p: d for p, d in enumerate(self._digests) if d is not None}:
            raise PageError("the index and the pages disagree about digests")

    def _known(self, page: int) -> bool:
        return 0 < page < self.num_pages

    def _unregister(self, page: int) -> None:
        digest = self._digests[page]
        if digest is not None:
            del self._index[digest]
        self._digests[page] = None
