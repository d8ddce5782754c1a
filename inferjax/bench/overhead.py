"""What the engine adds to the bare decode function: same model, batch, tokens and contexts.

Rounds of both take turns, so that a change of the machine's speed meets both.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from inferjax.bench.latency import greedy_state, zero_cache
from inferjax.checkpoint.load import Model
from inferjax.config import Exec
from inferjax.engine import Counters, Engine, EngineConfig
from inferjax.errors import InferjaxError, InvalidInput
from inferjax.kv.cache import KVCache
from inferjax.runtime.steps import decode
from inferjax.sampling import SamplingParams

GOAL = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: `rounds` times, `num_tokens` a sequence after `context`, K per dispatch."""

    batches: tuple[int, ...] = (8, 32)
    context: int = 32
    num_tokens: int = 64
    steps: int = 8
    rounds: int = 5

    @property
    def length(self) -> int:
        """The tokens of a sequence at its end: the first one is drawn by the prefill."""
        return self.context + 1 + self.num_tokens


def measure(
    model: Model, plan: Plan, *, exec: Exec = Exec(), progress: bool = False
) -> dict[str, Any]:
    """Run the plan and return plain values, one row per batch.

    Raises: InvalidInput for a plan that does not fit the model.
    """
    _check(plan, model)
    # The first round of each batch compiles and does not count.
    total = len(plan.batches) * (1 + plan.rounds)
    with tqdm.tqdm(total=total, unit="round", delay=2, disable=not progress) as bar:
        rows = [_row(model, batch, plan, exec, bar.update) for batch in plan.batches]
    return {"plan": dataclasses.asdict(plan), "goal": GOAL, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    plan = result["plan"]
    lines = [
        f"{plan['steps']} tokens per dispatch, contexts {plan['context']} to "
        f"{plan['context'] + plan['num_tokens']}; medians over {plan['rounds']} rounds that take "
        f"turns; goal: at most {result['goal']:.0%} over the bare function",
        "",
        "       ms per token               with                host ms per token",
        "batch    bare   engine    more  reports    more    plan  dispatch  collect",
    ]
    for row in result["rows"]:
        host = row["host_ms"]
        lines.append(
            f"{row['batch']:5}{row['bare_ms']:8.2f}{row['engine_ms']:9.2f}{row['overhead']:8.1%}"
            f"{row['reporting_ms']:9.2f}{row['overhead_over_reporting']:8.1%}"
            f"{host['plan']:8.3f}{host['dispatch']:10.3f}{host['collect']:9.3f}"
        )
    lines += [
        "",
        "reports: the bare function, made to report as many top log-probabilities as the engine's "
        "programs do. collect contains waiting for the device.",
    ]
    return "\n".join(lines)


def _check(plan: Plan, model: Model) -> None:
    sizes = (*plan.batches, plan.context, plan.num_tokens, plan.steps, plan.rounds)
    fits = plan.length <= model.config.max_context
    if min(sizes) < 1 or plan.num_tokens % plan.steps or plan.num_tokens < 2 * plan.steps:
        raise InvalidInput(
            f"sizes {sizes} of the benchmark",
            why="they count from 1, and num_tokens must be at least two whole dispatches",
            fix="make num_tokens a multiple of steps",
        )
    if not fits:
        raise InvalidInput(
            f"the benchmark needs {plan.length} tokens of context",
            why=f"the model's context is {model.config.max_context} tokens",
            fix="choose a smaller context or fewer tokens",
        )


def _row(
    model: Model, batch: int, plan: Plan, exec: Exec, done: Callable[[], object]
) -> dict[str, Any]:
    config = _engine_config(batch, plan, exec)
    bare = _Bare(model, batch, plan, exec)
    reporting = _Bare(
        model, batch, plan, dataclasses.replace(exec, top_logprobs=config.max_logprobs)
    )
    served = _Served(model, config, batch, plan, exec)
    times: dict[str, list[float]] = {"bare": [], "reporting": [], "engine": []}
    try:
        for kind in (bare, reporting, served):
            kind.run()
        done()
        served.counted = Counters()
        for _ in range(plan.rounds):
            times["bare"] += bare.run()
            times["engine"] += served.run()
            times["reporting"] += reporting.run()
            done()
    finally:
        served.engine.close()
    if not times["engine"]:
        raise InferjaxError(
            f"the engine never decoded {batch} sequences at once",
            why="it admitted fewer, so there is nothing to compare",
            fix="report it: the benchmark gives it pages and slots for all",
        )
    ms = {name: 1e3 * statistics.median(spent) / plan.steps for name, spent in times.items()}
    counted, num_steps = served.counted, len(times["engine"]) * plan.steps
    return {
        "batch": batch,
        **{f"{name}_ms": value for name, value in ms.items()},
        "overhead": ms["engine"] / ms["bare"] - 1,
        "overhead_over_reporting": ms["engine"] / ms["reporting"] - 1,
        "host_ms": {
            "plan": 1e3 * counted.plan_s / num_steps,
            "dispatch": 1e3 * counted.dispatch_s / num_steps,
            "collect": 1e3 * counted.collect_s / num_steps,
        },
    }


def _engine_config(batch: int, plan: Plan, exec: Exec) -> EngineConfig:
    """Return an engine of exactly `batch` sequences that prefills all of them in one dispatch."""
    # The scheduler admits a sequence only while every decoding one could take a further page.
    pages_per_sequence = 1 + -(-plan.length // exec.page_size)
    row_tokens = EngineConfig().row_tokens
    rows_per_prompt = -(-plan.context // row_tokens)
    return EngineConfig(
        max_running=batch,
        max_len=plan.length,
        num_pages=1 + batch * pages_per_sequence,
        token_budget=batch * rows_per_prompt * row_tokens,
        decode_steps=plan.steps,
    )


class _Bare:
    """The decode function with nothing around it, waited for after every dispatch."""

    def __init__(self, model: Model, batch: int, plan: Plan, exec: Exec) -> None:
        self._model, self._batch, self._plan, self._exec = model, batch, plan, exec
        self._cache, self._pages = zero_cache(
            model.params, model.config, batch=batch, length=plan.length, exec=exec
        )

    def run(self) -> list[float]:
        """Return the seconds of every dispatch of a round."""
        state = jax.block_until_ready(
            greedy_state(self._batch, self._plan.context + 1, self._pages)
        )
        cache: KVCache = self._cache
        times = []
        for _ in range(self._plan.num_tokens // self._plan.steps):
            start = time.perf_counter()
            output, state, cache = decode(
                self._model.params,
                self._model.config,
                cache,
                state,
                steps=self._plan.steps,
                exec=self._exec,
            )
            jax.block_until_ready(output.values)
            times.append(time.perf_counter() - start)
        self._cache = cache
        return times


class _Served:
    """The engine, with as many requests as it runs at a time."""

    def __init__(
        self, model: Model, config: EngineConfig, batch: int, plan: Plan, exec: Exec
    ) -> None:
        self.engine = Engine(model, config, exec=exec)
        self.counted = Counters()
        self._batch, self._plan = batch, plan
        self._draw = np.random.default_rng(0)
        self._vocab_size = model.config.vocab_size

    def run(self) -> list[float]:
        """Return the seconds between steps that brought whole dispatches of all sequences."""
        # The prefill draws the first token.
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1 + self._plan.num_tokens, ignore_eos=True
        )
        for _ in range(self._batch):
            prompt = self._draw.integers(0, self._vocab_size, self._plan.context)
            self.engine.submit(prompt.tolist(), sampling)
        times: list[float] = []
        since: float | None = None
        before = self.engine.stats().totals
        while self.engine.has_work:
            deltas = self.engine.step()
            now = time.perf_counter()
            whole = sum(len(delta.tokens.ids) == self._plan.steps for delta in deltas)
            after = self.engine.stats().totals
            if whole == self._batch and since is not None:
                times.append(now - since)
                self._count(before, after)
            since = time.perf_counter() if whole == self._batch else None
            before = after
        return times

    def _count(self, before: Counters, after: Counters) -> None:
        for name in ("plan_s", "dispatch_s", "collect_s"):
            spent = getattr(after, name) - getattr(before, name)
            setattr(self.counted, name, getattr(self.counted, name) + spent)
