"""Takes in what a dispatch brought: tokens to their sequences, text to its stream, ends."""

import collections
import dataclasses
from collections.abc import Callable

from inferjax.config import ModelConfig
from inferjax.engine.batch import Piece
from inferjax.engine.completion import Delta, FinishReason, Tokens
from inferjax.engine.dispatch import Drawn, Extended, Handle
from inferjax.engine.scheduler import Scheduler
from inferjax.engine.sequence import Phase, Sequence
from inferjax.engine.stats import Counters
from inferjax.engine.track import (
    Report,
    RequestTrack,
    SampleTrack,
    delta_of,
    tokens_of,
    top_pairs,
)
from inferjax.errors import InferjaxError
from inferjax.runtime.arguments import error_for_status


@dataclasses.dataclass(frozen=True, slots=True)
class ExtendFlight:
    """A prefill under way."""

    handle: Handle[Extended]
    pieces: list[Piece]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeFlight:
    """A decode under way: every sequence with its slot and the tokens it may draw."""

    handle: Handle[Drawn]
    rows: list[tuple[Sequence, int, int]]


type Flight = ExtendFlight | DecodeFlight


class Collector:
    """Knows whose results arrive; what users are told goes to `outbox`."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: ModelConfig,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.tracks: dict[int, SampleTrack] = {}
        self.requests: dict[str, RequestTrack] = {}
        self.outbox: collections.deque[Delta] = collections.deque()
        self._scheduler = scheduler
        self._eos_ids = frozenset(config.eos_ids)
        self._counters = counters
        self._clock = clock

    def collect(self, flight: Flight) -> None:
        """Wait for a dispatch and take in its results."""
        if isinstance(flight, ExtendFlight):
            self._extended(flight.handle.read(), flight.pieces)
        else:
            drawn = flight.handle.read()
            for sequence, slot, planned in flight.rows:
                self._row(sequence, drawn, slot, planned)

    def fail(self, sequence: Sequence, error: InferjaxError) -> None:
        """End a sequence's request with an error."""
        sample = self.tracks.get(sequence.uid)
        if sample is not None:
            self._end_request(sample.request, "error", error)

    def abort(self, request: RequestTrack) -> None:
        """End what is left of a request, without a word to its stream."""
        for sample in request.samples:
            if sample.finish_reason is None:
                self._end_sample(sample, "abort")
        self._forget(request)

    def restart(self) -> list[Sequence]:
        """Forget what was collected but not reported, and return the sequences that go on.

        The step before may have broken off anywhere, also while it reported an end.
        """
        told = {delta.request_id for delta in self.outbox if delta.completion is not None}
        for name, request in list(self.requests.items()):
            if name in told:
                self._forget(request)
            elif request.finished:
                self._report_end(request, delta_of(request.samples[-1], "", Tokens()))
        going = [s for r in self.requests.values() for s in r.samples if s.finish_reason is None]
        self.tracks.clear()
        self.tracks.update((sample.sequence.uid, sample) for sample in going)
        for sample in going:
            sample.rewind()
        return [sample.sequence for sample in going]

    def _extended(self, result: Extended, pieces: list[Piece]) -> None:
        for piece in pieces:
            sequence = piece.chunk.sequence
            rows = slice(piece.first, piece.first + piece.count)
            bits = int(result.status[rows].max(initial=0))
            sample = self.tracks.get(sequence.uid)
            if sample is None:
                continue
            if bits:
                self.fail(sequence, error_for_status(bits, sample.request.request.request_id))
                continue
            if sequence.scored:
                _take_scores(sample.request, result, piece)
            if piece.draws and result.first is not None:
                self._row(sequence, result.first, piece.first + piece.count - 1, 1)
                continue
            self._scheduler.collected(sequence, [], 0)
            if piece.chunk.last and sequence.max_len == sequence.prompt_len:
                self._finish(sample, Tokens(), "", "length", None)

    def _row(self, sequence: Sequence, drawn: Drawn, row: int, planned: int) -> None:
        """Take in the tokens of one row, unless its sequence has ended meanwhile."""
        sample = self.tracks.get(sequence.uid)
        if sample is None or sequence.phase is Phase.FINISHED:
            return
        bits = int(drawn.status[row])
        if bits:
            self.fail(sequence, error_for_status(bits, sample.request.request.request_id))
            return
        request = sample.request.request
        count = int(drawn.counts[row])
        tokens = tokens_of(drawn, row, count, request)
        total = sequence.num_drawn + count
        reason, cause = self._end_of(sample, tokens, total, bool(drawn.done[row]))
        silent = 1 if reason == "stop" and not request.sampling.include_stop else 0
        pushed = sample.text.push(tokens.ids[: count - silent])
        if pushed.stop is not None:
            tokens = tokens_of(drawn, row, pushed.num_tokens, request)
            reason, cause = "stop", pushed.stop
        self._scheduler.collected(sequence, list(tokens.ids), planned)
        self._counters.generated_tokens += len(tokens.ids)
        if sample.request.first_token is None and tokens.ids:
            sample.request.first_token = self._clock()
        self._finish(sample, tokens, pushed.text, reason, cause)

    def _end_of(
        self, sample: SampleTrack, tokens: Tokens, total: int, done: bool
    ) -> tuple[FinishReason | None, int | None]:
        """Return why a row ended, and the stop id that the request named."""
        if not done:
            return None, None
        sampling = sample.request.request.sampling
        if tokens.ids and total > sampling.min_tokens:
            last = tokens.ids[-1]
            if last in sampling.stop_token_ids:
                return "stop", last
            if last in self._eos_ids and not sampling.ignore_eos:
                return "stop", None
        # A row whose context is full is done too; see `overflow.py`.
        return None if sample.sequence.beyond else "length", None

    def _finish(
        self,
        sample: SampleTrack,
        tokens: Tokens,
        text: str,
        reason: FinishReason | None,
        cause: str | int | None,
    ) -> None:
        """Report tokens, and the end if it has come."""
        if reason is not None:
            text += sample.text.finish()
        if not sample.reports:
            text = sample.request.echo_text + text
        arrival = self._clock() - sample.request.request.submitted
        sample.reports.append(Report(tokens=tokens, arrival=arrival, reason=reason, cause=cause))
        if reason is not None:
            self._scheduler.finish(sample.sequence)
        delta = delta_of(sample, text, tokens)
        if sample.request.finished:
            self._report_end(sample.request, delta)
        elif text or tokens.ids or reason is not None:
            self.outbox.append(delta)

    def _report_end(self, request: RequestTrack, last: Delta) -> None:
        """Send a request's last delta. It goes out before it is forgotten: see `restart`."""
        completion = request.completion(self._clock())
        self.outbox.append(dataclasses.replace(last, error=request.error, completion=completion))
        if request.error is None:
            self._counters.finished += 1
        else:
            self._counters.failed += 1
        self._forget(request)

    def _end_sample(self, sample: SampleTrack, reason: FinishReason) -> None:
        sample.cut = reason
        self._scheduler.finish(sample.sequence)

    def _end_request(
        self, request: RequestTrack, reason: FinishReason, error: InferjaxError
    ) -> None:
        request.error = error
        for sample in request.samples:
            if sample.finish_reason is None:
                self._end_sample(sample, reason)
        self._report_end(request, delta_of(request.samples[-1], "", Tokens()))

    def _forget(self, request: RequestTrack) -> None:
        self.requests.pop(request.request.request_id, None)
        for sample in request.samples:
            self.tracks.pop(sample.sequence.uid, None)


def _take_scores(request: RequestTrack, result: Extended, piece: Piece) -> None:
    """Store the log-probabilities of the prompt tokens after those of a chunk."""
    if result.logprobs is None or result.top_ids is None or result.top_logprobs is None:
        return
    start, width = piece.chunk.start, result.logprobs.shape[1]
    # A resumed sequence also prefills its output, which has been reported.
    count = max(0, min(piece.chunk.stop, len(request.request.prompt_ids) - 1) - start)
    rows = slice(piece.first, piece.first + piece.count)
    values = result.logprobs[rows].reshape(-1)[:count].tolist()
    request.scores[start + 1 : start + 1 + count] = values
    shape = (piece.count * width, -1)
    ids = result.top_ids[rows].reshape(shape)[:count]
    tops = result.top_logprobs[rows].reshape(shape)[:count]
    wanted = request.request.sampling.prompt_logprobs or 0
    pairs = top_pairs(ids, tops, wanted) or ((),) * count
    request.top_scores[start + 1 : start + 1 + count] = pairs
