"""Throughput against latency: the same mix under one load after another, and the limit of both."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from inferjax.bench.roofline import Roofline, Step
from inferjax.bench.throughput import Load, measure
from inferjax.bench.workload import Mix, draw_asks
from inferjax.engine import Engine

# Requests per place of a closed loop, so that most of them run at the full concurrency.
ROUNDS = 4


def measure_levels(
    engine: Engine,
    roofline: Roofline,
    mix: Mix,
    loads: Sequence[Load],
    *,
    vocab_size: int,
    goals: dict[str, float] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a warm engine under each load; each begins with no prompt in the cache.

    In a closed loop there are at least `ROUNDS` requests per place. Returns plain values: one
    result of `throughput.measure` per load, and points of the curve that no step can pass.
    """
    levels = []
    for number, load in enumerate(loads):
        count = max(mix.num_requests, ROUNDS * (load.max_concurrency or 0))
        asks = draw_asks(dataclasses.replace(mix, num_requests=count), vocab_size)
        levels.append(
            measure(
                engine,
                roofline,
                asks,
                load,
                goals=goals,
                cache_salt=f"level-{number}",
                progress=progress,
            )
        )
    return {
        "mix": dataclasses.asdict(mix),
        "levels": levels,
        "limits": _curve(levels, roofline),
    }


def _curve(levels: list[dict[str, Any]], roofline: Roofline) -> list[dict[str, Any]]:
    """Return the limit for batches beyond the largest seen, at the mean context and prefill."""
    found = [level["roofline"] for level in levels]
    context = sum(point["mean_context"] for point in found) / len(found)
    # The least prefill of any level, so that the curve is a limit for all.
    prefill = min(point["prefill_per_token"] for point in found)
    largest = max(point["mean_batch"] for point in found)
    batches = itertools.takewhile(lambda n: n <= 2 * largest, (1 << i for i in itertools.count()))
    points = []
    for batch in batches:
        limit = roofline.limit(Step(batch=batch, context=context, prefill=prefill))
        points.append(
            {
                "batch": batch,
                "tpot_ms": 1e3 * limit.seconds,
                "output_tok_s": batch / limit.seconds,
                "bound": limit.bound,
            }
        )
    return points


def load_name(load: dict[str, Any]) -> str:
    """Return how a level is called in the table and the plot."""
    if load["request_rate"] is not None:
        return f"{load['request_rate']:g} requests/s"
    if load["max_concurrency"] is not None:
        return f"{load['max_concurrency']} at a time"
    return "all at once"


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure_levels` for people."""
    lines = [
        "                   output     with  requests  TTFT ms          TPOT ms          limit",
        "load             tokens/s  prompts        /s      p50      p99     p50     p99  "
        "tokens/s  reached",
    ]
    for level in result["levels"]:
        ttft, tpot = (level["latency_ms"].get(name, {}) for name in ("ttft", "tpot"))
        limit = level["roofline"]
        lines.append(
            f"{load_name(level['load']):16}{level['output_tok_s']:9.1f}{level['total_tok_s']:9.1f}"
            f"{level['requests_s']:10.2f}{_ms(ttft, 'p50', 9)}{_ms(ttft, 'p99', 9)}"
            f"{_ms(tpot, 'p50', 8)}{_ms(tpot, 'p99', 8)}{limit['output_tok_s']:10.0f}  "
            f"{limit['reached_share']:.0%} of {limit['bound']}"
        )
    return "\n".join(lines)


def _ms(spread: dict[str, float], name: str, width: int) -> str:
    return f"{spread[name]:{width}.1f}" if name in spread else " " * (width - 1) + "-"
