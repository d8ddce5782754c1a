"""Turns plans into the arrays of a dispatch, with the same few shapes whatever runs.

Keeps what the host knows of the slots: whose they are, and their block tables. Arrays that are
handed out are copies; nobody writes to them again.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from inferjax.engine.buckets import BucketPlan, bucket_for
from inferjax.engine.dispatch import Decode, Extend, Rows
from inferjax.engine.plan import Chunk, Plan, Shift
from inferjax.engine.sequence import Sequence
from inferjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What only the request knows of a sequence's row in the decode state."""

    key: tuple[int, int]
    sample_index: int
    forced: tuple[int, ...]
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk in the rows of an extend: rows [first, first + count), and whether it draws."""

    chunk: Chunk
    first: int
    count: int
    draws: bool


class Batches:
    """Builds the dispatches of one engine."""

    def __init__(
        self,
        *,
        buckets: BucketPlan,
        num_groups: int,
        pages_per_row: int,
        max_len: int,
        row_of: Callable[[Sequence], Row],
    ) -> None:
        self._buckets = buckets
        self._max_len = max_len
        self._row_of = row_of
        self._num_slots = buckets.decode_slots[-1]
        self._max_rows = buckets.prefill_rows[-1]
        shape = (self._num_slots, pages_per_row)
        self._tables = [np.zeros(shape, np.int32) for _ in range(num_groups)]
        self._owners: list[int | None] = [None] * self._num_slots

    def shift(self, shift: Shift) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Return sources and targets per cache group, filled up to the entries of a table."""
        return self._page_rows(shift.sources), self._page_rows(shift.targets)

    def _page_rows(self, groups: tuple[list[int], ...]) -> tuple[np.ndarray, ...]:
        rows = tuple(np.zeros(table.shape[1], np.int32) for table in self._tables)
        for row, pages in zip(rows, groups, strict=True):
            row[: len(pages)] = pages
        return rows

    def rows(self, plan: Plan) -> list[Rows]:
        """Return the writes to the decode state; moves go with the first."""
        index = np.arange(self._num_slots, dtype=np.int32)
        for old, new in plan.moves:
            index[new] = old
        if not plan.placed:
            return [self._rows(index, [])] if plan.moves else []
        batches = []
        for first in range(0, len(plan.placed), self._max_rows):
            batches.append(self._rows(index, plan.placed[first : first + self._max_rows]))
            index = np.arange(self._num_slots, dtype=np.int32)
        return batches

    def _rows(self, index: np.ndarray, sequences: list[Sequence]) -> Rows:
        size = self._max_rows
        rows = Rows(
            index=index,
            slots=np.full(size, self._num_slots, np.int32),
            tokens=np.zeros(size, np.int32),
            keys=np.zeros((size, 2), np.uint32),
            sample_index=np.zeros(size, np.int32),
            history=np.zeros((size, self._max_len), np.int32),
            lengths=np.ones(size, np.int32),
            prompt_lens=np.ones(size, np.int32),
            forced_lens=np.zeros(size, np.int32),
            sampling=[self._row_of(sequence).sampling for sequence in sequences],
        )
        for i, sequence in enumerate(sequences):
            self._fill(rows, i, sequence)
        return rows

    def _fill(self, rows: Rows, i: int, sequence: Sequence) -> None:
        own, tokens = self._row_of(sequence), sequence.tokens
        known, prompt_len = len(tokens), sequence.prompt_len
        rows.slots[i] = sequence.slot
        rows.tokens[i] = tokens[-1] if sequence.resumed else 0
        rows.keys[i] = own.key
        rows.sample_index[i] = own.sample_index
        rows.history[i, :known] = tokens
        rows.lengths[i] = known
        rows.prompt_lens[i] = prompt_len
        forced_len = min(prompt_len + len(own.forced), self._max_len)
        if forced_len > known:
            rows.history[i, known:forced_len] = own.forced[
                known - prompt_len : forced_len - prompt_len
            ]
            rows.forced_lens[i] = forced_len

    def extend(self, chunks: list[Chunk]) -> tuple[Extend, list[Piece]]:
        """Return the prefill of `chunks`, and where each of them is in it."""
        width, pieces, count = self._buckets.row_tokens, [], 0
        for chunk in chunks:
            draws = chunk.last and chunk.sequence.slot >= 0 and not chunk.sequence.resumed
            rows = -(-(chunk.stop - chunk.start) // width)
            pieces.append(Piece(chunk=chunk, first=count, count=rows, draws=draws))
            count += rows
        scored = any(chunk.sequence.scored for chunk in chunks)
        num_rows = self._max_rows if scored else bucket_for(self._buckets.prefill_rows, count)
        batch = Extend(
            tokens=np.zeros((num_rows, width), np.int32),
            lengths=np.zeros(num_rows, np.int32),
            starts=np.zeros(num_rows, np.int32),
            tables=tuple(np.zeros((num_rows, t.shape[1]), np.int32) for t in self._tables),
            slots=np.full(self._max_rows, self._num_slots, np.int32),
            targets=np.full((num_rows, width), -1, np.int32) if scored else None,
        )
        for piece in pieces:
            _fill_piece(batch, piece, width)
        return batch, pieces

    def decode(self, plan: Plan) -> Decode:
        """Return the decode of the plan's sequences."""
        for sequence in plan.decode:
            slot = sequence.slot
            if sequence.table_changed or self._owners[slot] != sequence.uid:
                for table, pages in zip(self._tables, sequence.pages, strict=True):
                    table[slot, : len(pages)] = pages
                    table[slot, len(pages) :] = 0
                self._owners[slot], sequence.table_changed = sequence.uid, False
        slots = [sequence.slot for sequence in plan.decode]
        size = bucket_for(self._buckets.decode_slots, max(slots) + 1)
        active = np.zeros(size, np.bool_)
        active[slots] = True
        tables = tuple(table[:size].copy() for table in self._tables)
        return Decode(tables=tables, active=active, steps=plan.steps, num_rows=size)


def _fill_piece(batch: Extend, piece: Piece, width: int) -> None:
    chunk, sequence = piece.chunk, piece.chunk.sequence
    last = piece.first + piece.count
    for table, pages in zip(batch.tables, sequence.pages, strict=True):
        table[piece.first : last, : len(pages)] = pages
    tokens = sequence.tokens
    for row, start in enumerate(range(chunk.start, chunk.stop, width), piece.first):
        stop = min(start + width, chunk.stop)
        batch.tokens[row, : stop - start] = tokens[start:stop]
        batch.lengths[row], batch.starts[row] = stop - start, start
        if batch.targets is not None and sequence.scored:
            targets = tokens[start + 1 : min(stop + 1, sequence.prompt_len)]
            batch.targets[row, : len(targets)] = targets
    if piece.draws:
        batch.slots[last - 1] = sequence.slot


def row_sampling(sampling: SamplingParams, sequence: Sequence) -> SamplingParams:
    """Return a row's settings where its output ends with its context, or its beginning is gone.

    See `overflow.py`; other rows have those of the request.
    """
    lost = sequence.lost[1]
    if not (sequence.beyond or lost):
        return sampling
    longest = sequence.max_len - sequence.prompt_len
    return dataclasses.replace(
        sampling,
        max_tokens=longest,
        min_tokens=min(longest, max(0, sampling.min_tokens - lost)),
        forced_token_ids=sampling.forced_token_ids[lost:],
    )
