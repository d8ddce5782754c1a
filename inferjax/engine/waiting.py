"""The queue of sequences that wait for pages and a slot."""

import heapq
from collections.abc import Iterator

from inferjax.engine.sequence import Phase, Sequence


class Waiting:
    """A heap by order; sequences that end while they wait stay in it until they surface.

    `operations` counts heap operations, for tests of cost.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._count = 0
        self.operations = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (s for _, _, s in self._heap if s.phase is Phase.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Add a waiting sequence."""
        heapq.heappush(self._heap, (sequence.order, sequence.uid, sequence))
        self._count += 1
        self.operations += 1

    def first(self) -> Sequence | None:
        """Return the sequence whose turn it is."""
        while self._heap and self._heap[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
            self.operations += 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Remove the sequence that `first` has just returned."""
        heapq.heappop(self._heap)
        self._count -= 1
        self.operations += 1

    def clear(self) -> None:
        """Forget everyone."""
        self._heap.clear()
        self._count = 0

    def drop(self) -> None:
        """Take note that a sequence has left the waiting phase by itself."""
        self._count -= 1
        # Without this, requests that are aborted behind a blocked one would stay for ever.
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._heap)
