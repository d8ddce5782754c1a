"""What the scheduler decides for one step: plain values, no arrays."""

import dataclasses

from inferjax.engine.sequence import Phase, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, stop) of a sequence, to be run in this step.

    With `last`, the prefill is complete: the sequence is placed in its slot, and unless it resumes
    an interrupted output its first token is drawn.
    """

    sequence: Sequence
    start: int
    stop: int
    last: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Page `source` of a cache group is copied to `target` before anything else runs."""

    group: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Page `sources[g][i]` of group g is written to `targets[g][i]`, its keys turned back.

    It comes before the copies: what it reads may be given out in the same plan. 0 is no page.
    """

    sources: tuple[list[int], ...]
    targets: tuple[list[int], ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class Plan:
    """One step: shifts, copies, one extend over `chunks`, then one decode of `steps` tokens.

    moves: slots that change, (old, new), to keep the occupied ones together. placed: sequences
    whose row must be written into the decode state, for they have a slot since this plan, or other
    tokens.
    failed: sequences that can never fit. preempted: for the record.
    """

    shifts: list[Shift] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    moves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    placed: list[Sequence] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)
    steps: int = 0
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    failed: list[Sequence] = dataclasses.field(default_factory=list)

    def drop_finished(self) -> None:
        """Leave out sequences that have ended since: a sample that fails ends its siblings."""
        self.placed = [s for s in self.placed if s.phase is not Phase.FINISHED]
        self.decode = [s for s in self.decode if s.phase is not Phase.FINISHED]
        self.chunks = [c for c in self.chunks if c.sequence.phase is not Phase.FINISHED]

    @property
    def empty(self) -> bool:
        """Whether nothing would run; rows that only move have to."""
        work = (self.shifts, self.copies, self.moves, self.placed, self.chunks, self.decode)
        return not any(work)
