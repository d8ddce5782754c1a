"""One streamed reply: tokens become text, stop strings are applied, speed is measured."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from inferjax.cli.stops import StopStrings


@runtime_checkable
class Detokenizer(Protocol):
    """Turns tokens into text piece by piece, never half a character."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Speed of one reply; rates leave out `compile_s`, `first_token_s` and `total_s` contain it."""

    num_prompt_tokens: int
    num_tokens: int
    first_token_s: float | None
    total_s: float
    compile_s: float
    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The whole reply; `finish_reason` is the model's own, "stop" or "interrupted"."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    finish_reason: str
    stop: str | None
    timings: Timings


def _nothing(start: float, end: float) -> float:
    del start, end
    return 0.0


def collect(
    events: Iterable[Any],
    detokenizer: Detokenizer,
    *,
    num_prompt_tokens: int,
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    emit: Callable[[str], object] = str,
    clock: Callable[[], float] = time.perf_counter,
    compile_seconds: Callable[[float, float], float] = _nothing,
) -> Reply:
    """Run `StreamEvent`s to their end, a stop string or Ctrl-C; give each piece of text to `emit`.

    The first `min_tokens` tokens are not searched for stop strings.
    """
    text = _Text(detokenizer, StopStrings(stops), min_tokens, emit)
    marks = [clock()]
    counts: list[int] = []
    finish = None
    try:
        for event in events:
            marks.append(clock())
            counts.append(len(event.token_ids))
            if text.add(event):
                finish = "stop"
                break
            finish = event.finish_reason
    except KeyboardInterrupt:
        finish = "interrupted"
    text.finish()
    return Reply(
        text="".join(text.pieces),
        token_ids=text.token_ids,
        logprobs=text.logprobs,
        top_ids=text.top_ids,
        top_logprobs=text.top_logprobs,
        finish_reason=finish or "length",
        stop=text.stops.matched,
        timings=_timings(marks, counts, num_prompt_tokens, len(text.token_ids), compile_seconds),
    )


class _Text:
    """The reply so far."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        min_tokens: int,
        emit: Callable[[str], object],
    ) -> None:
        self.detokenizer, self.stops, self.emit = detokenizer, stops, emit
        self.min_tokens = min_tokens
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_ids: list[list[int]] = []
        self.top_logprobs: list[list[float]] = []

    def add(self, event: Any) -> bool:
        """Take one dispatch; return whether a stop string ended the text and dropped the rest."""
        for i, token_id in enumerate(event.token_ids):
            self.token_ids.append(token_id)
            self.logprobs.append(event.logprobs[i])
            self.top_ids.append(list(event.top_ids[i]))
            self.top_logprobs.append(list(event.top_logprobs[i]))
            piece, stopped = self.detokenizer.push(token_id), False
            if len(self.token_ids) > self.min_tokens:
                piece, stopped = self.stops.push(piece)
            self._show(piece)
            if stopped:
                return True
        return False

    def finish(self) -> None:
        """Show what was held back, unless a stop string ended the text."""
        if self.stops.matched is None:
            piece, _ = self.stops.push(self.detokenizer.flush())
            self._show(piece)
            if self.stops.matched is None:
                self._show(self.stops.flush())

    def _show(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self.emit(piece)


def _timings(
    marks: list[float],
    counts: list[int],
    num_prompt_tokens: int,
    num_tokens: int,
    compile_seconds: Callable[[float, float], float],
) -> Timings:
    """Rates from the moments the dispatches ended; the first one is the prefill."""
    start, end = marks[0], marks[-1]
    first = marks[1] if len(marks) > 1 else None

    def rate(count: int, low: float, high: float) -> float | None:
        spent = high - low - compile_seconds(low, high)
        return count / spent if count and spent > 0 else None

    return Timings(
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        first_token_s=None if first is None else first - start,
        total_s=end - start,
        compile_s=compile_seconds(start, end),
        prefill_tok_s=None if first is None else rate(num_prompt_tokens, start, first),
        decode_tok_s=None if first is None else rate(sum(counts[1:]), first, end),
    )
