"""What a request returns: deltas while it runs, a completion at its end."""

import dataclasses
from typing import Literal

from inferjax.errors import InferjaxError

FinishReason = Literal["stop", "length", "abort", "error"]
type TopLogprobs = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens and what was asked about them, one entry a token.

    `logprobs` are raw, equal to `score`; `sampled_logprobs` are under the distribution drawn from.
    `top_logprobs` has the request's number of most likely (id, log-probability) pairs, the best
    first, and `chosen_logprobs` one value per `logprob_token_ids`.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    chosen_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a request.

    `stop_reason` is the stop string or the id of `stop_token_ids` that ended it, None for the
    model's own end or another reason. `arrivals` are (seconds since submission, tokens) of every
    delta.
    """

    index: int
    text: str
    tokens: Tokens
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    arrivals: tuple[tuple[float, int], ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids drawn, a stop id included."""
        return self.tokens.ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The raw log-probability of every id."""
        return self.tokens.logprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a request took; `cached_tokens` of the prompt were found in the cache.

    `dropped_tokens`, of prompt and output, over all samples, were no longer seen by the model when
    the last token was drawn; always 0 unless `EngineConfig.overflow` is lossy.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    dropped_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of a request, None for what it never reached.

    ttft_s, the time to the first token, is queue_s (until its first tokens were dispatched) plus
    prefill_s. tpot_s is the time per further token, (e2e_s - ttft_s) / (tokens - 1), of the
    longest sample.
    """

    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. `error` is set when `finish_reason` of its samples is "error".

    `prompt_logprobs` starts with None, for nothing comes before the first token;
    `prompt_top_logprobs` likewise.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None
    num_preemptions: int = 0
    error: InferjaxError | None = None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's ids."""
        return self.samples[0].token_ids if self.samples else ()

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason if self.samples else "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of one sample. The request's last delta carries its `completion`."""

    request_id: str
    index: int
    text: str
    tokens: Tokens
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: InferjaxError | None = None
    completion: Completion | None = None
