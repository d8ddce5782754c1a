"""Puts a load on an engine, and makes figures of what came back.

Times are those of the one who waits: a request that a busy loop submitted late has waited since it
was due.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tqdm

from inferjax.bench.workload import Ask
from inferjax.engine import Completion, Counters, Engine
from inferjax.errors import InvalidInput
from inferjax.sampling import SamplingParams

PERCENTILES = (50, 90, 99)
GOALS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished request. `late_s` is how long after its time it was submitted."""

    completion: Completion
    late_s: float = 0.0

    @property
    def times_ms(self) -> dict[str, float]:
        """What is known of queue, prefill, ttft, tpot and e2el, in milliseconds.

        ttft: to the first token; it is queue plus prefill. tpot: per further token. e2el: to the
        end.
        """
        found, late = self.completion.timings, self.late_s
        seconds = {
            "queue": None if found.queue_s is None else found.queue_s + late,
            "prefill": found.prefill_s,
            "ttft": None if found.ttft_s is None else found.ttft_s + late,
            "tpot": found.tpot_s,
            "e2el": found.e2e_s + late,
        }
        return {name: 1e3 * value for name, value in seconds.items() if value is not None}

    @property
    def gaps_ms(self) -> list[float]:
        """The time between deltas that brought tokens."""
        arrivals = self.completion.samples[0].arrivals
        moments = [moment for moment, num_tokens in arrivals if num_tokens]
        return [1e3 * (b - a) for a, b in itertools.pairwise(moments)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A load that has been served: its requests, its time, what the engine counted meanwhile.

    `peak_live` are the most pages that sequences held after a step, per cache group.
    """

    served: tuple[Served, ...]
    seconds: float
    counted: Counters
    peak_live: tuple[int, ...]

    @property
    def good(self) -> list[Served]:
        """The requests that did not fail."""
        return [one for one in self.served if one.completion.error is None]


def serve(
    engine: Engine,
    asks: Sequence[Ask],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    cache_salt: str | None = None,
    progress: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Run:
    """Submit each request when its time has come, and run until all have ended.

    With `max_concurrency` a request also waits until fewer than that many run. `clock` is the
    engine's.

    Raises: as `Engine.submit`, for a request that the engine refuses.
    """
    todo = collections.deque(zip(asks, arrivals, strict=True))
    limit = len(asks) if max_concurrency is None else max_concurrency
    due: dict[str, float] = {}
    served: list[Served] = []
    before, peak = engine.stats(), engine.stats().pages_live
    start = clock()
    with tqdm.tqdm(total=len(asks), unit="request", delay=2, disable=not progress) as bar:
        while todo or due:
            while todo and len(due) < limit and todo[0][1] <= clock() - start:
                ask, moment = todo.popleft()
                name = engine.submit(ask.prompt, _sampling(ask), cache_salt=cache_salt)
                due[name] = max(0.0, clock() - start - moment) if max_concurrency is None else 0.0
            if not due:
                sleep(max(0.0, todo[0][1] - (clock() - start)))
                continue
            for delta in engine.step():
                if delta.completion is not None:
                    late = due.pop(delta.request_id)
                    served.append(Served(completion=delta.completion, late_s=late))
                    bar.update()
            peak = tuple(map(max, peak, engine.stats().pages_live))
    seconds = clock() - start
    counted = _difference(engine.stats().totals, before.totals)
    return Run(served=tuple(served), seconds=seconds, counted=counted, peak_live=peak)


def latencies(served: Iterable[Served]) -> dict[str, dict[str, float]]:
    """Return mean and percentiles in milliseconds: of every request, and itl of every gap."""
    found: dict[str, list[float]] = {name: [] for name in ("queue", "prefill", *GOALS, "itl")}
    for one in served:
        for name, value in one.times_ms.items():
            found[name].append(value)
        found["itl"] += one.gaps_ms
    return {name: _spread(values) for name, values in found.items() if values}


def meets(one: Served, goals: dict[str, float]) -> bool:
    """Return whether a request kept within all limits, in milliseconds.

    A request of one token has no tpot, and keeps within it.
    """
    times = one.times_ms
    return one.completion.error is None and all(
        times.get(name, 0.0) <= limit for name, limit in goals.items()
    )


def parse_goals(words: Iterable[str]) -> dict[str, float]:
    """Return the limits of words like "ttft:200".

    Raises: InvalidInput.
    """
    goals = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOALS or name in goals or not 0 < limit < float("inf"):
            raise InvalidInput(
                f"goodput limit {word!r}",
                why="a limit is NAME:MILLISECONDS, every name at most once",
                fix=f"names are {', '.join(GOALS)}, for example ttft:200",
            )
        goals[name] = limit
    return goals


def _sampling(ask: Ask) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=ask.num_tokens, ignore_eos=True)


def _spread(values: list[float]) -> dict[str, float]:
    points = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{p}": float(x) for p, x in zip(PERCENTILES, points, strict=True)},
    }


def _difference(after: Counters, before: Counters) -> Counters:
    names: Any = Counters.__dataclass_fields__
    return Counters(**{name: getattr(after, name) - getattr(before, name) for name in names})
