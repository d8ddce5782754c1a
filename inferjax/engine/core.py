"""The loop: plan, dispatch without waiting, collect the oldest dispatch.

The next plan is made while the device works. All state of the host side is in `Core`.
"""

import collections
import time
from collections.abc import Callable, Collection

import numpy as np

from inferjax.config import ModelConfig
from inferjax.engine.batch import Batches, Row, row_sampling
from inferjax.engine.collect import Collector, DecodeFlight, ExtendFlight, Flight
from inferjax.engine.completion import Delta
from inferjax.engine.dispatch import Programs
from inferjax.engine.plan import Plan
from inferjax.engine.scheduler import Scheduler
from inferjax.engine.sequence import Sequence
from inferjax.engine.sizes import Sizes
from inferjax.engine.stats import Counters
from inferjax.engine.track import RequestTrack
from inferjax.errors import InferjaxError, OutOfPages


class Core:
    """Scheduler, device and results of one engine; requests come in as tracks."""

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        sizes: Sizes,
        scheduler: Scheduler,
        programs: Programs,
        overlap: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = Counters()
        self.scheduler = scheduler
        self.programs = programs
        self.collector = Collector(scheduler, model_config, self.counters, clock)
        self._batches = Batches(
            buckets=sizes.buckets,
            num_groups=len(sizes.num_pages),
            pages_per_row=sizes.pages_per_row,
            max_len=sizes.max_len,
            row_of=self._row_of,
        )
        self._flights: collections.deque[Flight] = collections.deque()
        self._depth = 1 if overlap else 0
        self._clock = clock
        # A step that broke off leaves the device, and what the host knows of it, in any state.
        self._broken = self._torn = False

    @property
    def has_work(self) -> bool:
        """Whether a step could bring something."""
        return bool(self.collector.requests or self._flights or self.collector.outbox)

    @property
    def requests(self) -> dict[str, RequestTrack]:
        """Those that wait or run."""
        return self.collector.requests

    def enter(self, request: RequestTrack) -> None:
        """Queue a request's samples."""
        for sample in request.samples:
            self.collector.tracks[sample.sequence.uid] = sample
            self.scheduler.add(sample.sequence)
        self.collector.requests[request.request.request_id] = request
        self.counters.requests += 1

    def abort(self, request: RequestTrack) -> None:
        """End a request; what is under way for it is ignored when it arrives."""
        self._mend()
        self.collector.abort(request)
        self.silence({request.request.request_id})
        self.counters.aborted += 1

    def silence(self, names: Collection[str]) -> None:
        """Drop what a step that broke off would still have reported of requests."""
        outbox = self.collector.outbox
        kept = [delta for delta in outbox if delta.request_id not in names]
        outbox.clear()
        outbox.extend(kept)

    def step(self) -> list[Delta]:
        """Make one step; see `Engine.step`."""
        if self._broken:
            self._recover()
        self._broken = self._torn = True
        self._fill()
        if self._flights:
            began = self._clock()
            self.collector.collect(self._flights.popleft())
            self.counters.collect_s += self._clock() - began
        self._broken = self._torn = False
        deltas = list(self.collector.outbox)
        self.collector.outbox.clear()
        return deltas

    def drain(self) -> None:
        """Wait for what was dispatched beyond the end of all requests."""
        self._mend()
        while self._flights:
            self.collector.collect(self._flights.popleft())

    def _fill(self) -> None:
        """Dispatch until the device has work beyond what is waited for."""
        while len(self._flights) <= self._depth:
            began = self._clock()
            plan = self.scheduler.plan()
            self.counters.plan_s += self._clock() - began
            self.counters.preemptions += len(plan.preempted)
            for sequence in plan.failed:
                self.collector.fail(sequence, _no_room(sequence))
                plan.drop_finished()
            if plan.empty:
                self._check_progress(plan)
                return
            began = self._clock()
            self._dispatch(plan)
            self.counters.dispatch_s += self._clock() - began

    def _check_progress(self, plan: Plan) -> None:
        """Refuse to wait for ever: with nothing under way, something must have been planned."""
        stuck = not (self._flights or plan.failed or plan.preempted or self.collector.outbox)
        if stuck and self.collector.requests:
            raise InferjaxError(
                f"{len(self.collector.requests)} requests wait and nothing can run",
                why="the scheduler neither admitted nor refused them: a bug of the engine",
                fix="report it with the prompt lengths and the EngineConfig",
            )

    def _dispatch(self, plan: Plan) -> None:
        """Hand a plan to the device, in the order that the plan relies on."""
        for shift in plan.shifts:
            self.programs.shift(*self._batches.shift(shift))
        self.counters.shifts += len(plan.shifts)
        for group in sorted({copy.group for copy in plan.copies}):
            pairs = [(c.source, c.target) for c in plan.copies if c.group == group]
            sources, targets = np.array(pairs, np.int32).T
            self.programs.copy(group, sources, targets)
        for rows in self._batches.rows(plan):
            self.programs.place(rows)
        if plan.chunks:
            self._extend(plan)
        if plan.decode:
            self._decode(plan)

    def _extend(self, plan: Plan) -> None:
        now = self._clock()
        batch, pieces = self._batches.extend(plan.chunks)
        self._flights.append(ExtendFlight(self.programs.extend(batch), pieces))
        computed = int(batch.lengths.sum())
        self.counters.prefill_tokens += computed
        self.counters.padded_tokens += batch.tokens.size - computed
        self.counters.extend_dispatches += 1
        for piece in pieces:
            self._admitted(piece.chunk.sequence, now)

    def _admitted(self, sequence: Sequence, now: float) -> None:
        """Note when a request's first tokens were dispatched, and what its prompt found."""
        sample = self.collector.tracks.get(sequence.uid)
        if sample is None or sample.counted:
            return
        sample.counted = True
        self.counters.prompt_tokens += sequence.prompt_len
        self.counters.prefix_hit_tokens += sequence.cached or 0
        if sample.request.started is None:
            sample.request.started = now

    def _decode(self, plan: Plan) -> None:
        batch = self._batches.decode(plan)
        rows = [(sequence, sequence.slot, plan.steps) for sequence in plan.decode]
        self._flights.append(DecodeFlight(self.programs.decode(batch), rows))
        self.counters.decode_rows += len(rows) * plan.steps
        self.counters.padded_rows += (batch.num_rows - len(rows)) * plan.steps
        self.counters.decode_dispatches += 1

    def _row_of(self, sequence: Sequence) -> Row:
        sample = self.collector.tracks[sequence.uid]
        request = sample.request.request
        sampling = row_sampling(request.sampling, sequence)
        return Row(
            key=request.key(sum(sequence.lost)),
            sample_index=sample.index,
            forced=tuple(sampling.forced_token_ids),
            sampling=sampling,
        )

    def _recover(self) -> None:
        """Start over after an exception: the cache may be gone, what was reported is kept."""
        self._mend()
        self.programs.reset()
        self.counters.recoveries += 1
        self._broken = False

    def _mend(self) -> None:
        """Put the host side in order after an exception: everything waits to be run again."""
        if self._torn:
            self._flights.clear()
            self.scheduler.reset(self.collector.restart())
            self._torn = False


def _no_room(sequence: Sequence) -> OutOfPages:
    return OutOfPages(
        f"a sequence of {len(sequence.tokens)} tokens found no pages",
        why="the whole pool is not enough for it",
        fix="ask for fewer tokens, or give the engine more pages",
        num_tokens=len(sequence.tokens),
    )
