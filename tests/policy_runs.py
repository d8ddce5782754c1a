"""A scheduler with a device that only remembers: what was written where, and what is read back.

Keys and values are replaced by a digest of all tokens up to a position, and the next token follows
from it. A page that is shared, freed or copied wrongly shows at the first read.
"""

import dataclasses
import zlib
from collections import Counter, deque
from collections.abc import Sequence as List

from inferjax.engine.pages import SequencePages
from inferjax.engine.plan import Plan
from inferjax.engine.scheduler import Limits, Scheduler
from inferjax.engine.sequence import Phase, Sequence
from inferjax.kv.eviction import LRU
from inferjax.kv.pool import PagePool

STOP = 0
VOCAB = 23


def digests_of(root: bytes, tokens: List[int]) -> list[int]:
    chain = [zlib.crc32(root)]
    for token in tokens:
        chain.append(hash((chain[-1], token)))
    return chain[1:]


def drawn(digest: int, sample: int) -> int:
    return hash((digest, sample)) % VOCAB


def solo(sequence: Sequence) -> list[int]:
    """Return the tokens that a sequence must end with, computed without pages."""
    tokens = sequence.tokens[: sequence.prompt_len]
    digest = digests_of(sequence.root, tokens)[-1]
    while len(tokens) < sequence.max_len:
        tokens.append(drawn(digest, sequence.uid))
        digest = hash((digest, tokens[-1]))
        if tokens[-1] == STOP:
            break
    return tokens


@dataclasses.dataclass
class Row:
    """A row of the decode state."""

    sequence: Sequence
    tokens: list[int]
    done: bool = False


class Device:
    """Runs plans at once; results are handed over later."""

    def __init__(self, pages: SequencePages, num_slots: int) -> None:
        self.pages = pages
        self.rows: list[Row | None] = [None] * num_slots
        self.cache: dict[tuple[int, int, int], int] = {}

    def run(self, plan: Plan) -> list[list[tuple[Sequence, list[int], int, bool]]]:
        """Return the flights of a plan: (sequence, tokens, planned, done) of every row."""
        self._copy(plan)
        self._place(plan)
        flights = []
        if plan.chunks:
            flights.append(self._extend(plan))
        if plan.decode:
            flights.append([self._decode(s, plan.steps) for s in plan.decode])
        return flights

    def _copy(self, plan: Plan) -> None:
        for copy in plan.copies:
            for offset in range(self.pages.page_size):
                value = self.cache.get((copy.group, copy.source, offset), -1)
                self.cache[copy.group, copy.target, offset] = value

    def _place(self, plan: Plan) -> None:
        before = list(self.rows)
        for old, new in plan.moves:
            self.rows[new] = before[old]
        for sequence in plan.placed:
            self.rows[sequence.slot] = Row(sequence, list(sequence.tokens))

    def _extend(self, plan: Plan) -> list[tuple[Sequence, list[int], int, bool]]:
        for chunk in plan.chunks:
            self._write(chunk.sequence, chunk.sequence.tokens, chunk.start, chunk.stop)
        flight = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            for query in range(chunk.start, chunk.stop):
                self._read(sequence, sequence.tokens, query)
            draws = chunk.last and sequence.slot >= 0 and not sequence.resumed
            row = self.rows[sequence.slot] if draws else None
            tokens = [self._draw(row)] if row else []
            flight.append((sequence, tokens, int(draws), bool(row and row.done)))
        return flight

    def _decode(self, sequence: Sequence, steps: int) -> tuple[Sequence, list[int], int, bool]:
        row = self.rows[sequence.slot]
        assert row is not None
        assert row.sequence is sequence
        tokens = []
        for _ in range(steps):
            if not row.done:
                last = len(row.tokens) - 1
                self._write(sequence, row.tokens, last, last + 1)
                self._read(sequence, row.tokens, last)
                tokens.append(self._draw(row))
        return sequence, tokens, steps, row.done

    def _draw(self, row: Row) -> int:
        digest = digests_of(row.sequence.root, row.tokens)[-1]
        row.tokens.append(drawn(digest, row.sequence.uid))
        row.done = row.tokens[-1] == STOP or len(row.tokens) == row.sequence.max_len
        return row.tokens[-1]

    def _write(self, sequence: Sequence, tokens: List[int], start: int, stop: int) -> None:
        chain = digests_of(sequence.root, tokens[:stop])
        for group, table in enumerate(sequence.pages):
            for position in range(start, stop):
                page, offset = divmod(position, self.pages.page_size)
                # A page that the window has left may be missing: nobody reads it.
                if table[page]:
                    self.cache[group, table[page], offset] = chain[position]

    def _read(self, sequence: Sequence, tokens: List[int], query: int) -> None:
        chain = digests_of(sequence.root, tokens[: query + 1])
        for group, table in enumerate(sequence.pages):
            window = self.pages.windows[group]
            for position in range(0 if window is None else max(0, query - window + 1), query + 1):
                page, offset = divmod(position, self.pages.page_size)
                assert table[page], f"group {group} has no page for {position}, read at {query}"
                assert self.cache[group, table[page], offset] == chain[position]


class Run:
    """A scheduler and its device, with flights that are collected in order."""

    def __init__(
        self,
        *,
        num_pages: int | List[int] = 64,
        windows: List[int | None] = (None,),
        page_size: int = 4,
        prefix_caching: bool = True,
        **limits: object,
    ) -> None:
        counts = [num_pages] * len(windows) if isinstance(num_pages, int) else num_pages
        pools = [PagePool(n, LRU()) for n in counts]
        self.pages = SequencePages(pools, windows, page_size, prefix_caching)
        defaults = {"max_running": 4, "token_budget": 32, "row_tokens": 8, "max_rows": 4}
        self.limits = Limits(**(defaults | {"decode_steps": 2} | limits))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.pages, self.limits)
        self.device = Device(self.pages, self.limits.max_running)
        self.flights: deque[list[tuple[Sequence, list[int], int, bool]]] = deque()
        self.alive: list[Sequence] = []
        self.spoiled: set[Sequence] = set()
        self.num_added = 0
        self.seen: Counter[str] = Counter()

    def add(self, prompt: List[int], new: int = 4, **fields: object) -> Sequence:
        uid = self.num_added
        sequence = Sequence(
            uid=uid,
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_len=len(prompt) + new,
            **({"order": uid} | fields),  # type: ignore[arg-type]
        )
        self.num_added += 1
        self.alive.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> Plan:
        running = {s for s in self.alive if s.phase in (Phase.PREFILL, Phase.DECODE)}
        starts = {s: s.computed for s in running}
        plan = self.scheduler.plan()
        self._check_plan(plan, running, starts)
        self.spoiled.update(plan.failed)
        for kind in ("copies", "moves", "chunks", "decode", "preempted", "failed"):
            self.seen[kind] += len(getattr(plan, kind))
        self.seen["hits"] += sum(
            0 < c.start == c.sequence.cached for c in plan.chunks if not c.sequence.leader
        )
        self.flights.extend(self.device.run(plan))
        self.check()
        return plan

    def collect(self) -> None:
        """Collect the oldest flight, if there is any."""
        for sequence, tokens, planned, done in self.flights.popleft() if self.flights else ():
            self.scheduler.collected(sequence, tokens, planned)
            if done:
                self.scheduler.finish(sequence)
        self.check()

    def end(self, sequence: Sequence) -> None:
        """End a sequence from outside: its output is not compared."""
        self.spoiled.add(sequence)
        self.scheduler.abort(sequence)
        self.check()

    def reset(self) -> None:
        self.flights.clear()
        self.device.cache.clear()
        self.scheduler.reset(self.alive)
        self.check()

    def drain(self, depth: int = 1) -> None:
        """Run until everything has ended, `depth` flights behind; compare all outputs."""
        bound = 50 + 20 * sum(s.max_len for s in self.alive)
        for _ in range(bound):
            if not self.alive:
                break
            plan = self.plan()
            while len(self.flights) > (0 if plan.empty else depth):
                self.collect()
        assert not self.alive, "a sequence starves"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert all(pool.num_live == 0 for pool in self.pages.pools)

    def check(self) -> None:
        """Compare holders with tables, counts with phases, and what has ended with its oracle."""
        self.pages.check()
        for s in [s for s in self.alive if s.phase is Phase.FINISHED]:
            self.alive.remove(s)
            assert s.slot < 0
            assert not s.pages
            assert s in self.spoiled or s.tokens == solo(s)
        phases = Counter(s.phase for s in self.alive)
        assert self.scheduler.num_waiting == phases[Phase.WAITING]
        assert self.scheduler.num_running == phases[Phase.PREFILL] + phases[Phase.DECODE]
        for group, pool in enumerate(self.pages.pools):
            held = Counter(p for s in self.alive if s.pages for p in s.pages[group] if p)
            found = {p: pool.holders(p) for p in range(1, pool.num_pages) if pool.holders(p)}
            assert held == found
        slots = [s.slot for s in self.alive if s.phase is Phase.DECODE]
        assert len(set(slots)) == len(slots)
        for s in self.alive:
            assert (s.slot >= 0) == (s.phase is Phase.DECODE)
            assert bool(s.pages) == (s.phase is not Phase.WAITING)
            assert min(s.ahead, s.in_flight) >= 0

    def _check_plan(self, plan: Plan, running: set[Sequence], starts: dict[Sequence, int]) -> None:
        rows = sum(-(-(c.stop - c.start) // self.limits.row_tokens) for c in plan.chunks)
        assert rows <= self.limits.max_rows
        assert self.scheduler.num_running <= self.limits.max_running
        assert len({c.sequence for c in plan.chunks}) == len(plan.chunks)
        assert len(set(plan.decode)) == len(plan.decode)
        assert all(s.phase is Phase.DECODE for s in [*plan.decode, *plan.placed])
        assert bool(plan.decode) == bool(plan.steps)
        for chunk in plan.chunks:
            assert chunk.start == starts.get(chunk.sequence, chunk.start)
            assert chunk.start < chunk.stop <= chunk.sequence.prefill_end
        for victim in plan.preempted:
            assert victim in running
            assert victim.phase is Phase.WAITING
            key = (victim.order, victim.uid)
            stayed = [s for s in running if s.phase in (Phase.PREFILL, Phase.DECODE)]
            assert all((s.order, s.uid) < key for s in stayed)
