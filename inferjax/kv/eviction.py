"""Which cached page is given up first when a new one is needed."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Eviction(Protocol):
    """An order over the pages that nobody holds; every operation takes constant time."""

    def add(self, page: int) -> None:
        """Take in a page that has just lost its last holder."""
        ...

    def remove(self, page: int) -> None:
        """Let a page go that is wanted again, or whose contents are worthless."""
        ...

    def pop(self) -> int:
        """Remove the page that is missed least, and return it."""
        ...

    def __len__(self) -> int: ...


class LRU:
    """Give up the page that has been without a holder for the longest time."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def add(self, page: int) -> None:
        """Take in a page as the last to be given up."""
        self._pages[page] = None

    def remove(self, page: int) -> None:
        """Let a page go."""
        del self._pages[page]

    def pop(self) -> int:
        """Remove the page that was added first, and return it."""
        return self._pages.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._pages)


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LRU}
