"""Stop strings over streamed text: nothing that may still become one is emitted."""

from collections.abc import Sequence

from inferjax.errors import InvalidSampling


class StopStrings:
    """Cut a stream of text before the first stop string.

    The match that is complete first ends the text, the longest one if several end together, so the
    result does not depend on how the text is split into pieces. Held back is only the longest end
    of the text that a stop string begins with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InvalidSampling(
                "a stop string is empty",
                why="an empty string occurs before the first token, so nothing could be generated",
                fix="leave it out",
            )
        self.stops = tuple(stops)
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Take the next piece; return the text that is safe to show and whether to stop.

        A match that would be complete within a piece that is not `armed` is passed over for good.
        """
        if self.matched is not None:
            return "", True
        num_seen = len(self._held)
        self._held += text
        found = self._first_match(num_seen) if armed else None
        if found is not None:
            start, self.matched = found
            emit, self._held = self._held[:start], ""
            return emit, True
        cut = len(self._held) - self._possible_prefix()
        emit, self._held = self._held[:cut], self._held[cut:]
        return emit, False

    def flush(self) -> str:
        """Return what is held back; call it once when the text has ended without a match."""
        emit, self._held = self._held, ""
        return emit

    def _first_match(self, num_seen: int) -> tuple[int, str] | None:
        """Return where the first match starts that ends behind the characters seen before."""
        starts = ((self._held.find(s, max(0, num_seen + 1 - len(s))), s) for s in self.stops)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_prefix(self) -> int:
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self.stops):
                return size
        return 0
