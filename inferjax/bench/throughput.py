"""How many requests and tokens an engine serves a second, how long each takes, and the limit."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from inferjax.bench.roofline import Roofline, Step
from inferjax.bench.serving import Run, latencies, meets, serve
from inferjax.bench.workload import Ask, arrival_times
from inferjax.engine import Engine, Stats
from inferjax.engine.compilations import COMPILED
from inferjax.errors import InvalidInput
from inferjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests come.

    All at once; or `request_rate` a second at random moments (open loop); or one whenever another
    ends, `max_concurrency` at a time (closed loop).

    Raises: InvalidInput.
    """

    request_rate: float | None = None
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a load under which nothing would run."""
        arrival_times(0, self.request_rate, self.seed)
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InvalidInput(
                f"a concurrency of {self.max_concurrency}",
                why="nothing would run",
                fix="count from 1",
            )


def warm_up(engine: Engine, *, progress: bool = False) -> None:
    """Compile everything, then serve a request that leaves nothing behind for others to find."""
    engine.warmup(progress=progress)
    engine.generate([[0, 1]], SamplingParams(max_tokens=2, ignore_eos=True), cache_salt="warm-up")


def measure(
    engine: Engine,
    roofline: Roofline,
    asks: Sequence[Ask],
    load: Load,
    *,
    goals: dict[str, float] | None = None,
    cache_salt: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Serve the requests with a warm engine and return figures as plain values.

    Raises: InvalidInput, RequestTooLong, EngineFull for requests that the engine refuses.
    """
    arrivals = arrival_times(len(asks), load.request_rate, load.seed)
    with _compilations() as compiled:
        run = serve(
            engine,
            asks,
            arrivals,
            max_concurrency=load.max_concurrency,
            cache_salt=cache_salt,
            progress=progress,
        )
    return {
        "load": dataclasses.asdict(load),
        **figures(run, engine.stats(), goals or {}),
        "compilations": len(compiled),
        "roofline": _roofline(run, roofline),
    }


def figures(run: Run, stats: Stats, goals: dict[str, float]) -> dict[str, Any]:
    """Return what a run shows by itself; `stats` are the engine's at its end."""
    good, counted = run.good, run.counted
    num_output = sum(one.completion.usage.completion_tokens for one in good)
    num_prompt = sum(one.completion.usage.prompt_tokens for one in good)
    served = {
        "requests": len(run.served),
        "failed": len(run.served) - len(good),
        "seconds": run.seconds,
        "requests_s": len(good) / run.seconds,
        "output_tok_s": num_output / run.seconds,
        "total_tok_s": (num_prompt + num_output) / run.seconds,
    }
    if goals:
        served["goodput_requests_s"] = sum(meets(one, goals) for one in good) / run.seconds
        served["goals_ms"] = goals
    return {
        **served,
        "latency_ms": latencies(good),
        "prefill": {
            "asked_tokens": counted.prompt_tokens,
            "hit_tokens": counted.prefix_hit_tokens,
            "hit_share": _share(counted.prefix_hit_tokens, counted.prompt_tokens),
            "computed_tokens": counted.prefill_tokens,
            "padding_share": _share(
                counted.padded_tokens, counted.padded_tokens + counted.prefill_tokens
            ),
        },
        "decode": {
            "dispatches": counted.decode_dispatches,
            "padding_share": _share(counted.padded_rows, counted.padded_rows + counted.decode_rows),
        },
        "host_s": {
            "plan": counted.plan_s,
            "dispatch": counted.dispatch_s,
            "collect": counted.collect_s,
        },
        "pages": {
            "peak_live": run.peak_live,
            "live": stats.pages_live,
            "cached": stats.pages_cached,
            "free": stats.pages_free,
        },
        "preemptions": counted.preemptions,
    }


def mean_step(run: Run) -> Step:
    """Return the step that stands for a run.

    Its batch is how many requests were running on average: the sum of their times out of the queue
    over the time of the run.
    """
    running_s, positions, num_tokens = 0.0, 0.0, 0
    for one in run.good:
        found, usage = one.completion.timings, one.completion.usage
        running_s += found.e2e_s - (found.queue_s or 0.0)
        # The token at place i of the output attends to the prompt and i tokens.
        middle = usage.prompt_tokens + usage.completion_tokens / 2
        positions += usage.completion_tokens * middle
        num_tokens += usage.completion_tokens
    return Step(
        batch=max(1.0, running_s / run.seconds),
        context=positions / max(1, num_tokens),
        prefill=run.counted.prefill_tokens / max(1, num_tokens),
    )


def _roofline(run: Run, roofline: Roofline) -> dict[str, Any]:
    """Return the limit at the run's mean step, and the share of it that was reached."""
    step = mean_step(run)
    limit = roofline.limit(step)
    limit_tok_s = step.batch / limit.seconds
    num_output = sum(one.completion.usage.completion_tokens for one in run.good)
    return {
        **dataclasses.asdict(roofline.machine),
        "mean_batch": step.batch,
        "mean_context": step.context,
        "prefill_per_token": step.prefill,
        "step_ms": 1e3 * limit.seconds,
        "bound": limit.bound,
        "output_tok_s": limit_tok_s,
        "reached_share": num_output / run.seconds / limit_tok_s,
    }


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Collect the seconds of all compilations of the process, the engine's and others."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    prefill, decode, limit = result["prefill"], result["decode"], result["roofline"]
    pages, host = result["pages"], result["host_s"]
    lines = [
        f"{result['requests']} requests in {result['seconds']:.2f} s, {result['failed']} failed: "
        f"{result['requests_s']:.2f} requests/s, {result['output_tok_s']:.1f} output tokens/s, "
        f"{result['total_tok_s']:.1f} with prompts"
    ]
    if "goodput_requests_s" in result:
        goals = ", ".join(f"{name} <= {ms:g} ms" for name, ms in result["goals_ms"].items())
        lines.append(f"goodput    {result['goodput_requests_s']:.2f} requests/s within {goals}")
    lines += [
        f"prefill    {prefill['computed_tokens']} tokens computed of {prefill['asked_tokens']} "
        f"asked, {prefill['hit_share']:.1%} found in the cache; "
        f"padding {prefill['padding_share']:.1%}",
        f"decode     {decode['dispatches']} dispatches; padding {decode['padding_share']:.1%}",
        f"pages      at most {_list(pages['peak_live'])} live; at the end {_list(pages['live'])} "
        f"live, {_list(pages['cached'])} cached, {_list(pages['free'])} free; "
        f"{result['preemptions']} preemptions",
        f"host       plan {host['plan']:.2f} s, dispatch {host['dispatch']:.2f} s, waiting for "
        f"results and collecting {host['collect']:.2f} s; "
        f"{result['compilations']} compilations",
        f"limit      {limit['output_tok_s']:.0f} output tokens/s, set by {limit['bound']}, at the "
        f"mean batch of {limit['mean_batch']:.1f} and {limit['prefill_per_token']:.2f} prompt "
        f"tokens computed per output token ({limit['bandwidth_gbps']:.1f} GB/s, "
        f"{limit['matmul_gflops']:.0f} GFLOP/s); reached {limit['reached_share']:.0%}",
        "",
        "ms             mean       p50       p90       p99",
    ]
    for name, spread in result["latency_ms"].items():
        lines.append(f"{name:9}" + "".join(f"{value:10.1f}" for value in spread.values()))
    return "\n".join(lines)


def _list(counts: Sequence[int]) -> str:
    return " + ".join(str(count) for count in counts)
