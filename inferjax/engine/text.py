"""The text of one sample while its tokens arrive, cut at the first stop string."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from inferjax.tokenizer.stops import StopStrings


@runtime_checkable
class Detokenizer(Protocol):
    """Turns tokens into text piece by piece, never half a character."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Pushed:
    """What tokens became: text that is certain, how many of them count, the stop that ended it."""

    text: str
    num_tokens: int
    stop: str | None


class TextStream:
    """Text that may be shown at once: no half characters, nothing that may become a stop string.

    Tokens are taken one by one, so that the result does not depend on how many come together. The
    text ends before the stop string that is complete first, or after it with `include_stop`, and
    the token that completes it is the last one that counts. A stop string counts if it is complete
    after the first `min_tokens` tokens; it may begin within them. Without a detokenizer there is no
    text, and stop strings would never be found.

    Raises: InvalidSampling for an empty stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text so far, without what is held back."""
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> Pushed:
        """Take the next tokens; those after the end are dropped."""
        pieces: list[str] = []
        count = 0
        for token_id in token_ids:
            if self._finished or self.stop is not None:
                break
            count += 1
            self._num_tokens += 1
            if self._detokenizer is not None:
                pieces.append(self._shown(self._detokenizer.push(token_id)))
        return Pushed(self._kept(pieces), count, self.stop)

    def finish(self) -> str:
        """End the text, for whatever reason, and return what was held back."""
        if self._finished or self.stop is not None or self._detokenizer is None:
            self._finished = True
            return ""
        self._finished = True
        pieces = [self._shown(self._detokenizer.flush())]
        return self._kept([*pieces, self._stops.flush()])

    def _shown(self, piece: str) -> str:
        """Return what the stop strings let through."""
        shown, stopped = self._stops.push(piece, armed=self._num_tokens > self._min_tokens)
        return shown + (self.stop or "") if stopped and self._include_stop else shown

    def _kept(self, pieces: list[str]) -> str:
        text = "".join(pieces)
        if text:
            self._pieces.append(text)
        return text
