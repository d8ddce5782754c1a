"""What the engine remembers of a running request: its samples, their text, and when things came."""

import dataclasses
from collections.abc import Callable

import numpy as np

from inferjax.engine.completion import (
    Completion,
    Delta,
    FinishReason,
    Sample,
    Timings,
    Tokens,
    TopLogprobs,
    Usage,
)
from inferjax.engine.config import EngineConfig
from inferjax.engine.dispatch import Drawn
from inferjax.engine.request import Request
from inferjax.engine.sequence import Sequence
from inferjax.engine.stats import SequenceView
from inferjax.engine.text import TextStream
from inferjax.errors import InferjaxError
from inferjax.kv.prefix import cache_root
from inferjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tokens of a sample, when they came, and its end if they brought it.

    One value, so that an interrupt never finds tokens without the end that belongs to them.
    """

    tokens: Tokens
    arrival: float
    reason: FinishReason | None = None
    cause: str | int | None = None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class SampleTrack:
    """One sample: its sequence, its text, and what has been reported of it.

    `cut` is why it ended other than by its own tokens.
    """

    index: int
    sequence: Sequence
    request: "RequestTrack"
    text: TextStream
    counted: bool = False
    reports: list[Report] = dataclasses.field(default_factory=list)
    cut: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended, None while it goes on."""
        return self.cut or (self.reports[-1].reason if self.reports else None)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop id that ended it."""
        return self.reports[-1].cause if self.reports else None

    def rewind(self) -> None:
        """Forget tokens that were collected but not reported, after a step that broke off."""
        reported = [token for report in self.reports for token in report.tokens.ids]
        sequence = self.sequence
        del sequence.tokens[sequence.prompt_len + len(reported) - sequence.lost[1] :]
        self.text = self.request.text_stream()
        self.text.push(reported)

    def sample(self) -> Sample:
        """Return the finished sample."""
        shown = self.request.echo_text + self.text.text
        return Sample(
            index=self.index,
            text=shown,
            tokens=joined([report.tokens for report in self.reports]),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            arrivals=tuple((r.arrival, len(r.tokens.ids)) for r in self.reports),
        )


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class RequestTrack:
    """A request that runs. `scores` holds the log-probabilities of its prompt as they come."""

    request: Request
    text_stream: Callable[[], TextStream]
    echo_text: str = ""
    samples: list[SampleTrack] = dataclasses.field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    scores: list[float | None] = dataclasses.field(default_factory=list)
    top_scores: list[TopLogprobs | None] = dataclasses.field(default_factory=list)
    error: InferjaxError | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def completion(self, now: float) -> Completion:
        """Return the finished request."""
        request = self.request
        samples = tuple(track.sample() for track in self.samples)
        wanted = request.wants_prompt and self.error is None
        return Completion(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            samples=samples,
            usage=Usage(
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=self.samples[0].sequence.cached or 0,
                completion_tokens=sum(len(sample.token_ids) for sample in samples),
                dropped_tokens=sum(sum(track.sequence.lost) for track in self.samples),
            ),
            timings=self._timings(now, max(len(sample.token_ids) for sample in samples)),
            prompt_logprobs=tuple(self.scores) if wanted else None,
            prompt_top_logprobs=tuple(self.top_scores) if wanted else None,
            num_preemptions=sum(track.sequence.num_preemptions for track in self.samples),
            error=self.error,
        )

    def _timings(self, now: float, longest: int) -> Timings:
        begin, started, first = self.request.submitted, self.started, self.first_token
        rate = (now - first) / (longest - 1) if first is not None and longest > 1 else None
        return Timings(
            queue_s=None if started is None else started - begin,
            prefill_s=None if started is None or first is None else first - started,
            ttft_s=None if first is None else first - begin,
            tpot_s=rate,
            e2e_s=now - begin,
        )


def make_track(
    request: Request, tokenizer: Tokenizer | None, config: EngineConfig, origin: tuple[str, ...]
) -> RequestTrack:
    """Return a request's samples, ready for the scheduler; `origin` names the model and weights."""
    sampling, prompt_len = request.sampling, len(request.prompt_ids)
    skip = sampling.skip_special_tokens

    def text_stream() -> TextStream:
        return TextStream(
            None if tokenizer is None else tokenizer.detokenizer(skip_special_tokens=skip),
            stops=sampling.stop,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop,
        )

    echo = ""
    if sampling.echo and tokenizer is not None:
        echo = tokenizer.decode(request.prompt_ids, skip_special_tokens=skip)
    track = RequestTrack(request=request, text_stream=text_stream, echo_text=echo)
    if request.wants_prompt:
        track.scores, track.top_scores = [None] * prompt_len, [None] * prompt_len
    root = cache_root(*origin, request.cache_salt)
    leader = None
    for index in range(sampling.n):
        sequence = Sequence(
            uid=request.number * config.max_samples + index,
            tokens=list(request.prompt_ids),
            prompt_len=prompt_len,
            max_len=prompt_len + (sampling.max_tokens or 0),
            order=request.number + request.priority * config.priority_window,
            root=root,
            reads_cache=leader is not None or not request.wants_prompt,
            scored=leader is None and request.wants_prompt,
            leader=leader,
        )
        leader = leader or sequence
        track.samples.append(
            SampleTrack(index=index, sequence=sequence, request=track, text=text_stream())
        )
    return track


def failed_completion(request_id: str, error: InferjaxError) -> Completion:
    """Return the completion of a request that was refused."""
    return Completion(
        request_id=request_id,
        prompt_ids=(),
        samples=(Sample(index=0, text="", tokens=Tokens(), finish_reason="error"),),
        usage=Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
        timings=Timings(queue_s=None, prefill_s=None, ttft_s=None, tpot_s=None, e2e_s=0.0),
        error=error,
    )


def tokens_of(drawn: Drawn, row: int, count: int, request: Request) -> Tokens:
    """Return the first `count` tokens of a row, with as much detail as the request asked for."""
    num_top = request.sampling.logprobs or 0
    num_chosen = len(request.sampling.logprob_token_ids)
    return Tokens(
        ids=tuple(drawn.tokens[row, :count].tolist()),
        logprobs=tuple(drawn.logprobs[row, :count].tolist()),
        sampled_logprobs=tuple(drawn.sampled_logprobs[row, :count].tolist()),
        top_logprobs=top_pairs(
            drawn.top_ids[row, :count], drawn.top_logprobs[row, :count], num_top
        ),
        chosen_logprobs=tuple(map(tuple, drawn.chosen_logprobs[row, :count, :num_chosen].tolist()))
        if num_chosen
        else (),
    )


def top_pairs(ids: np.ndarray, values: np.ndarray, count: int) -> tuple[TopLogprobs, ...]:
    """Return the first `count` (id, log-probability) pairs of every place, nothing for 0."""
    if not count:
        return ()
    rows = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return tuple(tuple(zip(*row, strict=True)) for row in rows)


def joined(parts: list[Tokens]) -> Tokens:
    """Return the tokens of all parts, one after the other."""
    names = [field.name for field in dataclasses.fields(Tokens)]
    return Tokens(**{n: tuple(x for part in parts for x in getattr(part, n)) for n in names})


def delta_of(track: SampleTrack, text: str, tokens: Tokens) -> Delta:
    """Return what is new of a sample; its end, if it has come, is in it."""
    return Delta(
        request_id=track.request.request.request_id,
        index=track.index,
        text=text,
        tokens=tokens,
        finish_reason=track.finish_reason,
        stop_reason=track.stop_reason,
    )


def last_delta(request: RequestTrack, completion: Completion) -> Delta:
    """Return the end of a request, with nothing else new."""
    last = delta_of(request.samples[-1], "", Tokens())
    return dataclasses.replace(last, error=completion.error, completion=completion)


def view_of(track: SampleTrack) -> SequenceView:
    """Return what can be seen of a sample that waits or runs."""
    sequence = track.sequence
    return SequenceView(
        request_id=track.request.request.request_id,
        index=track.index,
        phase=sequence.phase.value,
        slot=sequence.slot if sequence.slot >= 0 else None,
        prompt_tokens=sequence.prompt_len,
        num_tokens=len(sequence.tokens),
        num_preemptions=sequence.num_preemptions,
        pages=tuple(tuple(pages) for pages in sequence.pages),
    )
