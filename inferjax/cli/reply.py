"""One streamed reply: its text as it comes, its tokens, its speed."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from inferjax.engine.text import Detokenizer, TextStream


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
    chosen_logprobs: list[list[float]]
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
    include_stop: bool = False,
    min_tokens: int = 0,
    emit: Callable[[str], object] = str,
    clock: Callable[[], float] = time.perf_counter,
    compile_seconds: Callable[[float, float], float] = _nothing,
) -> Reply:
    """Run `StreamEvent`s to their end, a stop string or Ctrl-C; give each piece of text to `emit`.

    A stop string that is complete within the first `min_tokens` tokens does not count.
    """
    text = TextStream(detokenizer, stops=stops, min_tokens=min_tokens, include_stop=include_stop)
    marks = [clock()]
    kept: list[Any] = []
    counts: list[int] = []
    finish = None
    try:
        for event in events:
            marks.append(clock())
            counts.append(len(event.token_ids))
            pushed = text.push(event.token_ids)
            kept.append((event, pushed.num_tokens))
            _emit(pushed.text, emit)
            finish = event.finish_reason
            if pushed.stop is not None:
                finish = "stop"
                break
    except KeyboardInterrupt:
        finish = "interrupted"
    _emit(text.finish(), emit)
    token_ids = _joined(kept, "token_ids")
    return Reply(
        text=text.text,
        token_ids=token_ids,
        logprobs=_joined(kept, "logprobs"),
        top_ids=_joined(kept, "top_ids"),
        top_logprobs=_joined(kept, "top_logprobs"),
        chosen_logprobs=_joined(kept, "chosen_logprobs"),
        finish_reason=finish or "length",
        stop=text.stop,
        timings=_timings(marks, counts, num_prompt_tokens, len(token_ids), compile_seconds),
    )


def _emit(piece: str, emit: Callable[[str], object]) -> None:
    if piece:
        emit(piece)


def _joined(kept: list[tuple[Any, int]], field: str) -> list[Any]:
    """Return the values that events have for their tokens that count."""
    return [value for event, count in kept for value in getattr(event, field)[:count]]


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
