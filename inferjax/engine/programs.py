"""The device side: the cache, the decode state, and the compiled programs over them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from inferjax.checkpoint.load import Model
from inferjax.config import Exec, cache_groups
from inferjax.engine.compilations import CompileWatch
from inferjax.engine.config import EngineConfig
from inferjax.engine.dispatch import Decode, Drawn, Extend, Extended, Rows
from inferjax.engine.sizes import Sizes
from inferjax.kv.cache import KVCache, init_cache
from inferjax.params import Params
from inferjax.runtime import slots
from inferjax.runtime.inputs import DecodeState, StepInputs
from inferjax.runtime.shift import shift_pages
from inferjax.sampling import Sampled, SampleState, SamplingParams
from inferjax.sampling.rows import sampling_rows

# Pages that one copy program moves.
COPY_PAGES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Later[T]:
    """Results on their way from the device."""

    arrays: Any
    make: Callable[[Any], T]

    def read(self) -> T:
        """Wait for the results and return them as NumPy arrays."""
        return self.make(jax.device_get(self.arrays))


class DevicePrograms:
    """Runs dispatches one after the other; every result is a promise."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        exec: Exec,
        *,
        sizes: Sizes,
    ) -> None:
        self.params: Params = model.params
        self.watch = CompileWatch(strict=config.strict)
        self._model = model.config
        self._config = config
        self._exec = dataclasses.replace(exec, top_logprobs=config.max_logprobs)
        self._sizes, self._buckets = sizes, sizes.buckets
        self._cache: KVCache | None = None
        self._state: DecodeState | None = None
        self.watch.start()
        self.reset()

    def reset(self) -> None:
        """Make a new cache and an empty decode state."""
        # What is left of the old ones goes first: memory may not hold both.
        for leaf in jax.tree.leaves((self._cache, self._state)):
            leaf.delete()
        self._cache = init_cache(
            self._model,
            num_pages=self._sizes.num_pages,
            exec=self._exec,
            dtype=self._exec.kv_dtype or str(self.params.embed.dtype),
        )
        empty = self._no_rows(self._config.max_running)
        self._state = jax.device_put(self._decode_state(empty, done=True))

    def copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages within a cache group, a fixed number per dispatch."""
        for first in range(0, len(sources), COPY_PAGES):
            pairs = np.zeros((2, COPY_PAGES), np.int32)
            part = slice(first, first + COPY_PAGES)
            pairs[:, : len(sources[part])] = sources[part], targets[part]
            self._copy(group, pairs[0], pairs[1])

    def _copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self._cache = self.watch.call(
            f"copy of group {group}",
            slots.copy_group_pages,
            self._cache,
            sources,
            targets,
            group=group,
        )

    def shift(self, sources: tuple[np.ndarray, ...], targets: tuple[np.ndarray, ...]) -> None:
        """Rewrite pages of a sequence whose tokens move back by what it has dropped."""
        if self._sizes.middle is None:
            return
        self._cache = self.watch.call(
            "shift",
            shift_pages,
            self._cache,
            sources,
            targets,
            config=self._model,
            distance=self._sizes.middle.size,
        )

    def place(self, rows: Rows) -> None:
        """Move slots and write new rows."""
        self._state = self.watch.call(
            "place",
            slots.place,
            self._state,
            rows.index,
            rows.slots,
            self._decode_state(rows, done=False),
        )

    def extend(self, batch: Extend) -> Later[Extended]:
        """Append given tokens; where slots are named, draw their first tokens."""
        inputs = StepInputs(
            tokens=batch.tokens,  # type: ignore[arg-type]
            lengths=batch.lengths,  # type: ignore[arg-type]
            starts=batch.starts,  # type: ignore[arg-type]
            block_tables=batch.tables,  # type: ignore[arg-type]
        )
        shared = {
            "config": self._model,
            "max_rows": self._buckets.prefill_rows[-1],
            "exec": self._exec,
        }
        scores: tuple[Any, ...] = ()
        if batch.targets is None:
            output, self._cache = self.watch.call(
                "prefill", slots.prefill_rows, self.params, self._cache, inputs, **shared
            )
            logits, status = output.values, output.status
        else:
            output, self._cache = self.watch.call(
                "score", slots.score_rows, self.params, self._cache, inputs, batch.targets, **shared
            )
            logits, status = output.values.last, output.status
            scores = (output.values.logprobs, output.values.top_ids, output.values.top_logprobs)
        first = self._begin(logits, batch.slots) if self._draws(batch) else None
        return _later((status, first, scores), _extended)

    def _draws(self, batch: Extend) -> bool:
        return bool((batch.slots < self._config.max_running).any())

    def _begin(self, logits: jax.Array, chosen: np.ndarray) -> Any:
        output, counts, done, self._state = self.watch.call(
            "begin",
            slots.begin,
            logits,
            self._state,
            chosen,
            config=self._model,
            exec=self._exec,
        )
        return output.values, counts, done, output.status

    def decode(self, batch: Decode) -> Later[Drawn]:
        """Draw up to `batch.steps` tokens for the active slots."""
        output, counts, done, self._state, self._cache = self.watch.call(
            "decode",
            slots.decode_slots,
            self.params,
            self._cache,
            self._state,
            batch.tables,
            batch.active,
            np.int32(batch.steps),
            config=self._model,
            steps=self._config.decode_steps,
            exec=self._exec,
        )
        return _later((output.values, counts, done, output.status), lambda found: _drawn(*found))

    def warmup(self, *, progress: bool = False) -> None:
        """Compile everything by running it on nothing: no page but the trash page is touched."""
        calls = self._warmup_calls()
        self.watch.learning = True
        try:
            for call in tqdm.tqdm(calls, desc="compiling", unit="program", disable=not progress):
                call()
        finally:
            self.watch.learning = False
        jax.block_until_ready((self._cache, self._state))
        self.watch.sealed = True

    def _warmup_calls(self) -> list[Callable[[], object]]:
        nowhere = np.zeros(COPY_PAGES, np.int32)
        groups = range(len(cache_groups(self._model)))
        largest = self._buckets.prefill_rows[-1]
        # -1 is no slot either, but not the padding for which nothing is drawn.
        no_slot = np.full(largest, -1, np.int32)
        calls: list[Callable[[], object]] = [
            lambda g=g: self._copy(g, nowhere, nowhere) for g in groups
        ]
        if self._buckets.shifts:
            no_pages = tuple(table[0] for table in self._no_tables(1))
            calls.append(lambda: self.shift(no_pages, no_pages))
        calls.append(lambda: self.place(self._no_rows(largest)))
        calls += [lambda b=b: self.decode(self._no_decode(b)) for b in self._buckets.decode_slots]
        calls += [lambda r=r: self.extend(self._no_extend(r)) for r in self._buckets.prefill_rows]
        calls.append(lambda: self.extend(self._no_extend(largest, scored=True)))
        calls.append(lambda: self.extend(self._no_extend(largest, chosen=no_slot)))
        return calls

    def _no_rows(self, count: int) -> Rows:
        num_slots = self._config.max_running
        return Rows(
            index=np.arange(num_slots, dtype=np.int32),
            slots=np.full(count, num_slots, np.int32),
            tokens=np.zeros(count, np.int32),
            keys=np.zeros((count, 2), np.uint32),
            sample_index=np.zeros(count, np.int32),
            history=np.zeros((count, self._sizes.max_len), np.int32),
            lengths=np.ones(count, np.int32),
            prompt_lens=np.ones(count, np.int32),
            forced_lens=np.zeros(count, np.int32),
            sampling=(),
        )

    def _no_decode(self, size: int) -> Decode:
        return Decode(
            tables=self._no_tables(size), active=np.zeros(size, np.bool_), steps=1, num_rows=size
        )

    def _no_extend(
        self, size: int, *, scored: bool = False, chosen: np.ndarray | None = None
    ) -> Extend:
        shape, num_slots = (size, self._buckets.row_tokens), self._config.max_running
        nobody = np.full(self._buckets.prefill_rows[-1], num_slots, np.int32)
        return Extend(
            tokens=np.zeros(shape, np.int32),
            lengths=np.zeros(size, np.int32),
            starts=np.zeros(size, np.int32),
            tables=self._no_tables(size),
            slots=nobody if chosen is None else chosen,
            targets=np.full(shape, -1, np.int32) if scored else None,
        )

    def _no_tables(self, size: int) -> tuple[np.ndarray, ...]:
        shape = (size, self._sizes.pages_per_row)
        return tuple(np.zeros(shape, np.int32) for _ in self._sizes.num_pages)

    def _decode_state(self, rows: Rows, *, done: bool) -> DecodeState:
        """Return the rows as a state of NumPy arrays; rows without settings are greedy."""
        size = len(rows.tokens)
        rest = [SamplingParams(temperature=0.0)] * (size - len(rows.sampling))
        sample: Any = {
            "key": rows.keys,
            "sample_index": rows.sample_index,
            "position": rows.lengths,
            "history": rows.history,
            "history_len": rows.lengths,
            "prompt_len": rows.prompt_lens,
            "forced_len": rows.forced_lens,
        }
        return DecodeState(
            tokens=rows.tokens,  # type: ignore[arg-type]
            done=np.full(size, done),  # type: ignore[arg-type]
            sample=SampleState(**sample),
            sampling=sampling_rows(
                [*rows.sampling, *rest],
                vocab_size=self._model.vocab_size,
                eos_ids=self._model.eos_ids,
                widths=self._config.widths,
            ),
            block_tables=(),
        )

    def facts(self) -> dict[str, Any]:
        """Return what is known of compilations."""
        return {
            "compilations": self.watch.count,
            "compile_s": self.watch.seconds,
            "late_compilations": self.watch.surprises,
        }

    def close(self) -> None:
        """Stop listening to jax."""
        self.watch.close()


def _later[T](arrays: Any, make: Callable[[Any], T]) -> Later[T]:
    for leaf in jax.tree.leaves(arrays):
        leaf.copy_to_host_async()
    return Later(arrays, make)


def _drawn(values: Sampled, counts: np.ndarray, done: np.ndarray, status: np.ndarray) -> Drawn:
    columns = values if values.tokens.ndim == 2 else jax.tree.map(lambda x: x[:, None], values)
    return Drawn(
        tokens=np.asarray(columns.tokens),
        logprobs=np.asarray(columns.logprobs),
        sampled_logprobs=np.asarray(columns.sampled_logprobs),
        top_ids=np.asarray(columns.top_ids),
        top_logprobs=np.asarray(columns.top_logprobs),
        chosen_logprobs=np.asarray(columns.chosen_logprobs),
        counts=counts,
        done=done,
        status=status,
    )


def _extended(found: Any) -> Extended:
    status, first, scores = found
    logprobs, top_ids, top_logprobs = scores or (None, None, None)
    return Extended(
        status=status,
        first=None if first is None else _drawn(*first),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
