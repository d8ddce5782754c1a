"""Requests and clocks made by hand, and a made-up machine, for the tests of the benchmarks."""

import functools

from tiny_models import tiny_model

import inferjax as ij
from inferjax.bench.roofline import Machine, Roofline
from inferjax.bench.serving import Served
from inferjax.engine import Sample, Timings, Tokens, Usage
from inferjax.errors import InferjaxError, NonFiniteLogits

EXEC = ij.Exec(page_size=8)
MACHINE = Machine(bandwidth_gbps=10.0, matmul_gflops=50.0)


@functools.cache
def tiny_roofline() -> Roofline:
    """Return limits of the tiny model on a made-up machine."""
    model = tiny_model("llama")
    return Roofline(model.params, model.config, MACHINE, EXEC)


def served(
    *,
    queue: float = 0.1,
    prefill: float = 0.2,
    gaps: tuple[float, ...] = (0.1, 0.3),
    per_delta: int = 2,
    prompt_tokens: int = 4,
    late: float = 0.0,
    error: InferjaxError | None = None,
) -> Served:
    """Return a request whose first delta brought one token, and the others `per_delta`."""
    moments = [queue + prefill]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    counts = [1] + [per_delta] * len(gaps)
    num_tokens = sum(counts)
    e2e, ttft = moments[-1], moments[0]
    sample = Sample(
        index=0,
        text="",
        tokens=Tokens(ids=(1,) * num_tokens),
        finish_reason="length",
        arrivals=tuple(zip(moments, counts, strict=True)),
    )
    completion = ij.Completion(
        request_id="",
        prompt_ids=(1,) * prompt_tokens,
        samples=(sample,),
        usage=Usage(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=num_tokens),
        timings=Timings(
            queue_s=queue,
            prefill_s=prefill,
            ttft_s=ttft,
            tpot_s=(e2e - ttft) / (num_tokens - 1) if num_tokens > 1 else None,
            e2e_s=e2e,
        ),
        error=error,
    )
    return Served(completion=completion, late_s=late)


def failed() -> Served:
    """Return a request that went wrong."""
    return served(error=NonFiniteLogits("NaN"))


class FakeClock:
    """A clock that moves by a fixed step whenever it is read, and by what is slept."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step
        self.slept: list[float] = []

    def __call__(self) -> float:
        """Return the time."""
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.slept.append(seconds)
        self.now += seconds
