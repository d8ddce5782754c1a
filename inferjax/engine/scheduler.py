"""Which sequences run in the next step: continuous batching as plain policy, without arrays.

A step is planned before the results of the last one are known. The scheduler therefore works with
bounds: `Sequence.ahead` tokens may have been drawn beyond the collected ones. The device runs
dispatches in order, so a page or slot that is free here can be given out at once.
"""

import dataclasses
import functools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from inferjax.engine.overflow import Middle
from inferjax.engine.pages import SequencePages
from inferjax.engine.plan import Chunk, Plan
from inferjax.engine.sequence import Phase, Sequence
from inferjax.engine.slots import Slots
from inferjax.engine.waiting import Waiting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold.

    token_budget: tokens in a step, counting one per decoding sequence and whole rows of
      `row_tokens` for prompts; one row always may run, so that prompts never starve.
    max_rows: rows of an extend. decode_steps: tokens per decode dispatch; `mixed_steps` while
      prompts run or wait (None: the same). priority_window: arrivals that one level of priority
      is worth. buckets: ascending numbers of slots that a decode is compiled for.
    """

    max_running: int
    token_budget: int
    row_tokens: int
    max_rows: int
    decode_steps: int
    mixed_steps: int | None = None
    priority_window: int = 1000
    buckets: tuple[int, ...] = ()

    def rows(self, num_decoding: int) -> int:
        """Return how many rows of prompt tokens may run beside decoding sequences."""
        return min(self.max_rows, max(1, (self.token_budget - num_decoding) // self.row_tokens))

    @property
    def span(self) -> int:
        """The most tokens of one sequence in a dispatch."""
        return max(self.rows(0) * self.row_tokens, self.decode_steps)


@runtime_checkable
class Preemption(Protocol):
    """What becomes of the cache of a preempted sequence: the place where offloading plugs in."""

    def evicted(self, sequence: Sequence) -> None:
        """Take note of a sequence that is about to lose its pages."""
        ...


class Recompute:
    """Keep nothing: what the prefix cache has lost by the time of the resume is computed again."""

    def evicted(self, sequence: Sequence) -> None:
        """Do nothing."""


class Scheduler:
    """Decide step by step; `collected` brings back what each planned dispatch did.

    Sequences go by (order, uid), and the first one never waits for a later one: running ones are
    preempted from the end, and whoever cannot be admitted keeps all behind it waiting. With a
    `middle`, sequences may outgrow their context: see `overflow.py`.
    """

    def __init__(
        self,
        pages: SequencePages,
        limits: Limits,
        preemption: Preemption | None = None,
        middle: Middle | None = None,
    ) -> None:
        self.pages = pages
        self.limits = limits
        self._preemption = preemption or Recompute()
        self._middle = middle
        self._waiting = Waiting()
        self._running: list[Sequence] = []
        self._slots = Slots(limits.max_running)
        self._looked_at = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without pages, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with pages: in prefill or decoding."""
        return len(self._running)

    @property
    def operations(self) -> int:
        """Units of work so far: sequences looked at, pages moved, heap operations."""
        return self._looked_at + self.pages.operations + self._waiting.operations

    def never_fits(self, num_tokens: int) -> bool:
        """Return whether so many cached tokens do not even fit the empty pools."""
        return self.pages.never_fits(num_tokens, self.limits.span)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        if self._middle:
            self._middle.admit(sequence)
        self._waiting.push(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in whatever phase it is; its pages and slot are free at once."""
        self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence; twice does no harm. Its work in flight is still to be collected."""
        phase, sequence.phase = sequence.phase, Phase.FINISHED
        if phase is Phase.WAITING:
            self._waiting.drop()
        elif phase is not Phase.FINISHED:
            self._leave(sequence)

    def collected(self, sequence: Sequence, tokens: list[int], planned: int) -> None:
        """Take in the results of one dispatch, in dispatch order.

        `planned` is how many tokens it might have drawn: `Plan.steps` for a decode, 1 for a chunk
        that draws the first token, 0 for another. What comes for a sequence that has ended is
        dropped. A sequence of full length is finished here.
        """
        sequence.in_flight -= 1
        sequence.ahead -= planned
        if sequence.phase is Phase.FINISHED:
            return
        sequence.tokens.extend(tokens)
        if sequence.phase is Phase.DECODE:
            sequence.computed = sequence.prefill_end
            self.pages.register(sequence, sequence.computed)
            self.pages.trim(sequence, sequence.computed)
        full = len(sequence.tokens) >= sequence.max_len and not sequence.beyond
        if full and self._is_prefilled(sequence):
            self.finish(sequence)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start over with these sequences waiting, all contents lost: the device has failed.

        Nothing else of the old state counts, for a step may have broken off anywhere. Nothing that
        was dispatched before may be collected after.
        """
        self.pages.reset()
        self._waiting.clear()
        self._running.clear()
        self._slots = Slots(self.limits.max_running)
        for sequence in sequences:
            sequence.restart()
            self._waiting.push(sequence)

    def plan(self) -> Plan:
        """Decide the next step, and count on it being dispatched."""
        plan = Plan(steps=self._steps())
        rows = self._continue(plan, self.limits.rows(self._slots.count))
        # Whoever was just preempted needs pages first.
        if rows and not plan.preempted:
            self._admit(plan, rows)
        plan.moves = self._slots.close_holes(self.limits.buckets, plan.placed)
        if not plan.decode:
            plan.steps = 0
        return plan

    def _steps(self) -> int:
        mixed = self.limits.mixed_steps
        alone = not self._waiting and self._slots.count == len(self._running)
        return self.limits.decode_steps if alone or mixed is None else mixed

    def _continue(self, plan: Plan, rows: int) -> int:
        """Plan for the running sequences in order; return the rows that are left.

        Only the last one is ever preempted, so what is already planned stays.
        """
        i, size = 0, self.pages.page_size
        while i < len(self._running):
            sequence = self._running[i]
            if sequence.phase is not Phase.DECODE:
                rows -= self._run_chunk(sequence, plan, rows) if rows else 0
            elif sequence.overflows:
                self._shift(sequence, plan)
            elif end := self._decode_end(sequence, plan.steps):
                # Most have their pages: this is all that is done for them.
                grow = functools.partial(self.pages.grow, sequence, end)
                if end <= len(sequence.pages[0]) * size or self._secure(sequence, plan, grow):
                    self._decode(sequence, plan)
            i += 1
        self._looked_at += i
        return rows

    def _secure(self, sequence: Sequence, plan: Plan, take: Callable[[], bool]) -> bool:
        """Let a running sequence take the pages it needs, if need be from later ones."""
        if take():
            return True
        self.pages.trim(sequence, sequence.computed)
        while not take():
            victim = self._running[-1]
            if len(self._running) > 1:
                self.preempt(victim)
                plan.preempted.append(victim)
            elif not sequence.in_flight:
                self._fail(sequence, plan)
            # Otherwise what is in flight may end it, or move its window on.
            if victim is sequence:
                return False
        return True

    def _decode_end(self, sequence: Sequence, steps: int) -> int:
        """Return where the tokens end that a decode writes, or 0 if nothing is left to draw.

        The last token drawn is not written.
        """
        reach, max_len = len(sequence.tokens) + sequence.ahead, sequence.max_len
        return 0 if reach >= max_len else min(reach + steps, max_len) - 1

    def _shift(self, sequence: Sequence, plan: Plan) -> None:
        """Drop the middle of a sequence that has filled its context, and let it decode on."""
        if self._middle is None:
            return
        start, stop = self._middle.start, self._middle.stop
        self.pages.trim(sequence, sequence.computed)
        take = functools.partial(self.pages.can_splice, sequence, start, stop)
        if self._secure(sequence, plan, take):
            plan.shifts.append(self.pages.splice(sequence, start, stop))
            sequence.drop(start, stop, self._middle.context)
            self._place(sequence, plan)

    def _decode(self, sequence: Sequence, plan: Plan) -> None:
        plan.decode.append(sequence)
        sequence.ahead += plan.steps
        sequence.in_flight += 1

    def _run_chunk(self, sequence: Sequence, plan: Plan, rows: int) -> int:
        """Plan the next tokens of a prefill; return the rows they take."""
        start = sequence.computed
        stop = min(sequence.prefill_end, start + rows * self.limits.row_tokens)
        if start == stop:
            return 0
        self.pages.trim(sequence, start)
        if not self._secure(sequence, plan, functools.partial(self.pages.grow, sequence, stop)):
            return 0
        last = stop == sequence.prefill_end
        plan.chunks.append(Chunk(sequence=sequence, start=start, stop=stop, last=last))
        sequence.computed = stop
        sequence.in_flight += 1
        self.pages.register(sequence, stop)
        if last and sequence.max_len > sequence.prompt_len:
            sequence.ahead += not sequence.resumed
            self._place(sequence, plan)
        return -(-(stop - start) // self.limits.row_tokens)

    def _place(self, sequence: Sequence, plan: Plan) -> None:
        """Have a sequence's row written, and let it decode at once if there are pages.

        Its window must not be trimmed for them: the chunk in this step still sees those pages.
        """
        if sequence.slot < 0:
            self._slots.take(sequence)
        sequence.phase = Phase.DECODE
        plan.placed.append(sequence)
        end = self._decode_end(sequence, plan.steps)
        if end and self.pages.grow(sequence, end):
            self._decode(sequence, plan)

    def _admit(self, plan: Plan, rows: int) -> None:
        """Let waiting sequences in, in order, until one finds no place."""
        promised: list[int] | None = None
        while rows and len(self._running) < self.limits.max_running:
            sequence = self._waiting.first()
            if sequence is None or self._must_wait(sequence, plan):
                return
            self._looked_at += 1
            if self.never_fits(self._lifespan(sequence)):
                self._fail(sequence, plan)
                continue
            promised = promised or self._promises()
            if not self._enter(sequence, plan, promised):
                return
            if sequence.computed == sequence.prefill_end:
                self._place(sequence, plan)
            else:
                rows -= self._run_chunk(sequence, plan, rows)
            promised = [a + b for a, b in zip(promised, self._promise(sequence), strict=True)]

    def _must_wait(self, sequence: Sequence, plan: Plan) -> bool:
        """Return whether results in flight, or the prompt that it shares, come first."""
        leader = sequence.leader
        if sequence.in_flight or leader is None or not self._forks(sequence):
            return sequence.in_flight > 0
        return leader.phase is Phase.PREFILL or leader in plan.placed

    def _enter(self, sequence: Sequence, plan: Plan, promised: list[int]) -> bool:
        """Give a waiting sequence the pages that others already have, if the rest has a place."""
        size, length = self.pages.page_size, sequence.prompt_len - 1
        leader = sequence.leader if self._forks(sequence) else None
        if leader and leader.phase is Phase.DECODE and self.pages.can_fork(leader, length):
            cost = self._fresh(sequence, length // size, length)
        else:
            leader = None
            num_hits = self.pages.match(sequence, self._match_limit(sequence))
            fresh = self._fresh(sequence, num_hits, num_hits * size)
            idle = self.pages.idle_hits(sequence, num_hits)
            length = num_hits * size
            cost = [a + b for a, b in zip(fresh, idle, strict=True)]
        for pool, wanted, others in zip(self.pages.pools, cost, promised, strict=True):
            if wanted > pool.num_available - others:
                return False
        self._waiting.pop()
        if leader:
            plan.copies += self.pages.fork(leader, sequence, length) or []
        else:
            self.pages.attach(sequence, length // size)
        if sequence.cached is None:
            sequence.cached = length
        sequence.phase = Phase.PREFILL
        insort(self._running, sequence, key=_turn)
        return True

    def _forks(self, sequence: Sequence) -> bool:
        """Return whether a sequence can do with a copy of its leader's prompt."""
        leader = sequence.leader
        if leader is None or leader.lost != sequence.lost:
            return False
        return not (sequence.resumed or sequence.scored)

    def _match_limit(self, sequence: Sequence) -> int:
        """Return how many tokens may come from the cache: the first draw needs a last one to run.

        A prompt whose tokens must all run has done so before its output is resumed.
        """
        if sequence.resumed:
            return sequence.prefill_end
        return sequence.prompt_len - 1 if sequence.reads_cache else 0

    def _lifespan(self, sequence: Sequence) -> int:
        """Return how many cached tokens a sequence is let in for: its prefill and one decode."""
        end = sequence.prefill_end
        return max(end, min(end + self.limits.decode_steps, sequence.max_len - 1))

    def _fresh(self, sequence: Sequence, num_pages: int, computed: int) -> list[int]:
        end = self._lifespan(sequence)
        return self.pages.fresh(num_pages, computed, end, self.limits.span)

    def _promise(self, sequence: Sequence) -> list[int]:
        """Return the pages per group that are kept for a running sequence.

        One while it decodes, unless it has all that it will ever need.
        """
        if sequence.phase is not Phase.DECODE:
            return self._fresh(sequence, len(sequence.pages[0]), sequence.computed)
        grows = len(sequence.pages[0]) * self.pages.page_size < sequence.max_len - 1
        return [int(grows)] * len(self.pages.pools)

    def _promises(self) -> list[int]:
        total, growing, size = [0] * len(self.pages.pools), 0, self.pages.page_size
        for sequence in self._running:
            if sequence.phase is Phase.DECODE:
                growing += len(sequence.pages[0]) * size < sequence.max_len - 1
            else:
                total = [a + b for a, b in zip(total, self._promise(sequence), strict=True)]
        self._looked_at += len(self._running)
        return [count + growing for count in total]

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; what it has in flight still counts."""
        self._preemption.evicted(sequence)
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1
        self._waiting.push(sequence)

    def _fail(self, sequence: Sequence, plan: Plan) -> None:
        self.finish(sequence)
        plan.failed.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, _turn(sequence), key=_turn)]
        self._slots.give(sequence)
        self.pages.release(sequence)

    def _is_prefilled(self, sequence: Sequence) -> bool:
        """Return whether a sequence of full length is complete: its prompt ran, if that is all."""
        if sequence.resumed:
            return True
        return sequence.computed == sequence.prompt_len and not sequence.in_flight


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.order, sequence.uid
