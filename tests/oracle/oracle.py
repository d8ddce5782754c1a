"""The engine's device programs over the hash model: lazy like a device, strict unlike one.

Whatever a row sees it reads through its block table, so a wrong page, slot, position, table, copy
or history gives wrong tokens. What can be seen to be wrong at once raises `Violation`.
"""

from collections.abc import Sequence

import numpy as np
from hash_cache import Batch, HashCache
from hash_model import logprob
from hash_slots import HashSlots
from lazy import Queue, Ticket, Violation

from inferjax.config import ModelConfig
from inferjax.engine.dispatch import Decode, Drawn, Extend, Extended, Rows


class Oracle:
    """The device: `num_pages` per cache group, `num_slots` rows of the decode state.

    `depth` is how many operations may wait before the oldest runs; 0 runs each at once. `faults`
    maps the count of an extend or decode (from 0) to the exception that it raises, and
    `read_faults` to what reading its handle raises. `capacity` is the length of the history; `top`
    and `chosen` are the most log-probabilities that are reported. `row_sizes` and `slot_sizes` are
    the numbers of rows that an extend and a decode are compiled for, () for any.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: Sequence[int],
        page_size: int,
        num_slots: int,
        max_rows: int,
        capacity: int,
        top: int = 5,
        chosen: int = 4,
        row_sizes: Sequence[int] = (),
        slot_sizes: Sequence[int] = (),
        depth: int = 2,
        seed: int = 0,
    ) -> None:
        self.config, self.num_pages, self.page_size = config, tuple(num_pages), page_size
        self.num_slots, self.max_rows, self.capacity = num_slots, max_rows, capacity
        self.top, self.chosen = top, chosen
        self.row_sizes, self.slot_sizes = row_sizes, slot_sizes
        self.random = np.random.default_rng(seed)
        self.queue = Queue(depth)
        self.faults: dict[int, BaseException] = {}
        self.read_faults: dict[int, BaseException] = {}
        self.num_dispatches = self.num_resets = 0
        self.params = None
        self._forget()

    def _forget(self) -> None:
        self.cache = HashCache(self.config, self.num_pages, self.page_size, self.random)
        self.slots = HashSlots(self.config, self.num_slots, self.capacity, self.top)

    def warmup(self, *, progress: bool = False) -> None:
        """Do nothing: hashes need no compiler."""

    def copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages within a cache group."""
        _check(np.int32, sources, targets)
        self.queue.add(lambda: self.cache.copy(group, sources, targets), (sources, targets))

    def shift(self, sources: tuple[np.ndarray, ...], targets: tuple[np.ndarray, ...]) -> None:
        """Rewrite pages whose tokens move back."""
        _check(np.int32, *sources, *targets)
        self.queue.add(lambda: self.cache.shift(sources, targets), (*sources, *targets))

    def place(self, rows: Rows) -> None:
        """Move slots and write new rows."""
        arrays = _arrays_of(rows)
        _check(np.int32, *(array for array in arrays if array is not rows.keys))
        _check(np.uint32, rows.keys)
        if rows.index.shape != (self.num_slots,) or rows.history.shape[1] != self.capacity:
            raise Violation(f"place has shapes {rows.index.shape} and {rows.history.shape}")
        self.queue.add(lambda: self.slots.place(rows), arrays)

    def extend(self, batch: Extend) -> Ticket[Extended]:
        """Append given tokens, draw first tokens."""
        fault, arrays = self._fault(), _arrays_of(batch)
        _check(np.int32, *arrays)
        shapes = {len(batch.tokens), len(batch.lengths), *(len(table) for table in batch.tables)}
        if batch.slots.shape != (self.max_rows,) or len(shapes) > 1:
            raise Violation(f"extend has {shapes} rows and {batch.slots.shape} slots")
        _check_size(len(batch.tokens), self.row_sizes)
        return self.queue.add(lambda: self._extend(batch), arrays, fault)

    def decode(self, batch: Decode) -> Ticket[Drawn]:
        """Draw up to `steps` tokens for every active row that is not done."""
        fault = self._fault()
        _check(np.int32, *batch.tables)
        _check(np.bool_, batch.active)
        shapes = {len(batch.active), *(len(table) for table in batch.tables)}
        if shapes != {batch.num_rows} or batch.steps < 1 or batch.num_rows > self.num_slots:
            raise Violation(f"decode has {shapes} rows for {batch.num_rows}, {batch.steps} steps")
        _check_size(batch.num_rows, self.slot_sizes)
        return self.queue.add(lambda: self._decode(batch), _arrays_of(batch), fault)

    def reset(self) -> None:
        """Forget everything in the cache and in the decode state."""
        self.num_resets += 1
        self.queue.drop()
        self._forget()

    def facts(self) -> dict[str, float]:
        """Return zeros."""
        return {"compilations": 0, "compile_s": 0.0, "late_compilations": 0}

    def close(self) -> None:
        """Do nothing."""

    def _fault(self) -> BaseException | None:
        count = self.num_dispatches
        self.num_dispatches += 1
        if count in self.faults:
            raise self.faults.pop(count)
        return self.read_faults.pop(count, None)

    def _extend(self, batch: Extend) -> Extended:
        rows = Batch(batch.tokens, batch.starts, batch.lengths, batch.tables)
        hidden = self.cache.forward(rows)
        scores = {} if batch.targets is None else self._scores(hidden, batch.targets)
        first = None
        if (batch.slots < self.num_slots).any():
            first = self._begin(batch, hidden)
        status = np.zeros(len(batch.lengths), np.int32)
        return _frozen(Extended(status=status, first=first, **scores))

    def _begin(self, batch: Extend, hidden: np.ndarray) -> Drawn:
        rows = np.flatnonzero(batch.slots < self.num_slots)
        slots, lengths = batch.slots[rows], batch.lengths[rows]
        ends = batch.starts[rows] + lengths
        if (self.slots.lengths[slots] != ends).any() or (lengths < 1).any():
            raise Violation(f"rows end at {ends}, their slots have {self.slots.lengths[slots]}")
        if len(np.unique(slots)) < len(slots):
            raise Violation(f"two rows draw for one slot: {slots}")
        first = self._empty(self.max_rows, 1)
        self.slots.draw(first, 0, rows, slots, hidden[rows, lengths - 1])
        first.done[rows] = self.slots.done[slots]
        return first

    def _scores(self, hidden: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        ids = self.slots.top_ids(hidden)
        values = logprob(hidden, np.maximum(targets, 0).astype(np.uint64))
        return {
            "logprobs": np.where(targets < 0, 0, values).astype(np.float32),
            "top_ids": ids.astype(np.int32),
            "top_logprobs": logprob(hidden[..., None], ids).astype(np.float32),
        }

    def _decode(self, batch: Decode) -> Drawn:
        drawn, state = self._empty(batch.num_rows, batch.steps), self.slots
        for step in range(batch.steps):
            rows = np.flatnonzero(batch.active & ~state.done[: batch.num_rows])
            if not len(rows):
                break
            tables = tuple(table[rows] for table in batch.tables)
            ones = np.ones(len(rows), np.int64)
            newest = Batch(state.tokens[rows, None], state.lengths[rows] - 1, ones, tables)
            state.draw(drawn, step, rows, rows, self.cache.forward(newest)[:, 0])
        drawn.done[:] = state.done[: batch.num_rows]
        return _frozen(drawn)

    def _empty(self, rows: int, steps: int) -> Drawn:
        return Drawn(
            tokens=np.zeros((rows, steps), np.int32),
            logprobs=np.zeros((rows, steps), np.float32),
            sampled_logprobs=np.zeros((rows, steps), np.float32),
            top_ids=np.zeros((rows, steps, self.top), np.int32),
            top_logprobs=np.zeros((rows, steps, self.top), np.float32),
            chosen_logprobs=np.zeros((rows, steps, self.chosen), np.float32),
            counts=np.zeros(rows, np.int32),
            done=np.zeros(rows, np.bool_),
            status=np.zeros(rows, np.int32),
        )


def _arrays_of(batch: Rows | Extend | Decode) -> list[np.ndarray]:
    values = [getattr(batch, name) for name in type(batch).__dataclass_fields__]
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return [value for value in flat if isinstance(value, np.ndarray)]


def _check(dtype: type, *arrays: np.ndarray) -> None:
    wrong = [array.dtype for array in arrays if array.dtype != dtype]
    if wrong:
        raise Violation(f"dtypes {wrong} where {dtype} is agreed")


def _check_size(count: int, sizes: Sequence[int]) -> None:
    if sizes and count not in sizes:
        raise Violation(f"{count} rows, where programs for {sizes} are compiled")


def _frozen[T: (Drawn, Extended)](result: T) -> T:
    """Make the results read-only, as those of a device are."""
    for name in type(result).__dataclass_fields__:
        value = getattr(result, name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, Drawn):
            _frozen(value)
    return result
