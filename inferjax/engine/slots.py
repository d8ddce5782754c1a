"""Which sequence has which row of the decode state."""

import heapq
from bisect import bisect_left
from collections.abc import Collection

from inferjax.engine.sequence import Sequence


class Slots:
    """Give out the lowest free slot, so that the occupied ones stay together."""

    def __init__(self, num_slots: int) -> None:
        self._owners: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._top = 0
        self.count = 0

    def take(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free slot."""
        sequence.slot = heapq.heappop(self._free)
        self._owners[sequence.slot] = sequence
        self._top = max(self._top, sequence.slot + 1)
        self.count += 1

    def give(self, sequence: Sequence) -> None:
        """Free a sequence's slot, if it has one."""
        if sequence.slot < 0:
            return
        self._owners[sequence.slot] = None
        heapq.heappush(self._free, sequence.slot)
        sequence.slot = -1
        self.count -= 1
        while self._top and self._owners[self._top - 1] is None:
            self._top -= 1

    def close_holes(
        self, buckets: tuple[int, ...], unplaced: Collection[Sequence]
    ) -> list[tuple[int, int]]:
        """Move the highest sequences into holes when a smaller bucket then holds them all.

        Return the moves as (old, new), without those of `unplaced` sequences: their rows have yet
        to be written.
        """
        target = bisect_left(buckets, self.count)
        if target == bisect_left(buckets, self._top):
            return []
        moves = []
        while self._top > buckets[target]:
            sequence = self._owners[self._top - 1]
            if sequence is None:
                break
            old = sequence.slot
            self.give(sequence)
            self.take(sequence)
            if sequence not in unplaced:
                moves.append((old, sequence.slot))
        return moves
