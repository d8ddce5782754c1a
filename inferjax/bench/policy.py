"""What the scheduler costs by itself: many running, many more waiting, no device."""

import dataclasses
import statistics
import time
from typing import Any

import tqdm

from inferjax.config import Exec
from inferjax.engine.buckets import BucketPlan, sizes_up_to
from inferjax.engine.config import EngineConfig
from inferjax.engine.scheduler import Scheduler
from inferjax.engine.sequence import Sequence
from inferjax.engine.sizes import Sizes, make_scheduler
from inferjax.errors import InvalidInput

GOAL_MS = 1.0
PAGE_SIZE = Exec().page_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: `steps` plans with `running` sequences, for each number waiting.

    Each is measured twice: while nothing changes, and with a turnover of one sequence a step that
    ends, one that is admitted, and one that comes.
    """

    running: int = 256
    waiting: tuple[int, ...] = (0, 10_000, 100_000)
    steps: int = 200
    prompt_len: int = 64


def measure(plan: Plan, *, progress: bool = False) -> dict[str, Any]:
    """Run the plan and return plain values.

    Raises: InvalidInput.
    """
    if min(plan.running, plan.steps, plan.prompt_len) < 1 or min(plan.waiting, default=-1) < 0:
        raise InvalidInput(
            f"sizes {plan.running}, {plan.waiting}, {plan.steps}, {plan.prompt_len}",
            why="running, steps and prompt length count from 1, waiting from 0",
            fix="give larger numbers",
        )
    cases = [(False, waiting) for waiting in plan.waiting]
    cases += [(True, waiting) for waiting in plan.waiting if waiting]
    bar = tqdm.tqdm(cases, unit="case", delay=2, disable=not progress)
    rows = [_Case(plan, waiting, turnover=turnover).row() for turnover, waiting in bar]
    return {"plan": dataclasses.asdict(plan), "goal_ms": GOAL_MS, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    plan = result["plan"]
    lines = [
        f"{plan['running']} running, medians of {plan['steps']} steps; goal: a plan in less than "
        f"{result['goal_ms']:g} ms with 10000 waiting",
        "",
        "                            ms per step          operations",
        "              waiting     plan      p99  collect   per plan",
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['kind']:12}{row['waiting']:9}{row['plan_ms']:9.3f}{row['plan_p99_ms']:9.3f}"
            f"{row['collect_ms']:9.3f}{row['operations']:11.0f}"
        )
    return "\n".join(lines)


class _Case:
    """A scheduler in its steady state."""

    def __init__(self, plan: Plan, waiting: int, *, turnover: bool) -> None:
        self._plan, self._turnover, self._num_waiting = plan, turnover, waiting
        config = EngineConfig(max_running=plan.running)
        self._steps = config.decode_steps
        # Long enough that no sequence ends by itself.
        self._max_len = plan.prompt_len + (plan.steps + 2) * self._steps
        self._scheduler = _scheduler(config, self._max_len)
        self._running: list[Sequence] = []
        self._count = 0
        self._ids = list(range(max(50_000, 2 * plan.prompt_len)))
        for _ in range(plan.running):
            self._add()
        while len(self._running) < plan.running:
            self._step()
        for sequence in self._running:
            # The prompts took several steps; all have the same way to go from here.
            sequence.max_len = len(sequence.tokens) + (plan.steps + 2) * self._steps
        for _ in range(waiting):
            self._add()

    def row(self) -> dict[str, Any]:
        """Return the figures of all steps."""
        plans, collects, operations = [], [], []
        for _ in range(self._plan.steps):
            if self._turnover:
                self._scheduler.finish(self._running.pop(0))
                self._add()
            before = self._scheduler.operations
            plan_s, collect_s, counted = *self._step(), self._scheduler.operations - before
            plans.append(1e3 * plan_s)
            collects.append(1e3 * collect_s)
            operations.append(counted)
        return {
            "kind": "turnover" if self._turnover else "steady",
            "waiting": self._num_waiting,
            "plan_ms": statistics.median(plans),
            "plan_p99_ms": statistics.quantiles(plans, n=100)[-1] if len(plans) > 1 else plans[0],
            "collect_ms": statistics.median(collects),
            "operations": statistics.median(operations),
        }

    def _add(self) -> None:
        length = self._plan.prompt_len
        # Slices of one list share its numbers: 100,000 prompts stay small.
        first = self._count * 7919 % (len(self._ids) - length)
        tokens = self._ids[first : first + length]
        sequence = Sequence(
            uid=self._count,
            tokens=tokens,
            prompt_len=length,
            max_len=self._max_len,
            order=self._count,
        )
        self._count += 1
        self._scheduler.add(sequence)

    def _step(self) -> tuple[float, float]:
        """Plan a step, and collect what a device would have drawn; return the seconds of each."""
        start = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        for chunk in plan.chunks:
            self._scheduler.collected(chunk.sequence, [1] * chunk.last, int(chunk.last))
            if chunk.last:
                self._running.append(chunk.sequence)
        for sequence in plan.decode:
            self._scheduler.collected(sequence, [1] * plan.steps, plan.steps)
        return planned - start, time.perf_counter() - planned


def _scheduler(config: EngineConfig, max_len: int) -> Scheduler:
    """Return a scheduler with pages for all that run."""
    sizes = Sizes(
        page_size=PAGE_SIZE,
        num_pages=(1 + config.max_running * -(-max_len // PAGE_SIZE) * 2,),
        windows=(None,),
        max_len=max_len,
        buckets=BucketPlan(
            prefill_rows=sizes_up_to(config.max_rows, None),
            decode_slots=sizes_up_to(config.max_running, None),
            row_tokens=config.row_tokens,
            num_layers=1,
        ),
    )
    return make_scheduler(sizes, config)
