"""A cache and a resident state of a few slots, driven by hand as an engine drives them."""

import dataclasses
from typing import Any

import jax
import numpy as np
from paged_runs import poisoned_cache, shuffled_tables
from tiny_models import padded

import inferjax as ij
from inferjax.runtime import slots
from inferjax.runtime.inputs import DecodeState, StepInputs
from inferjax.sampling import SampleState, SamplingParams, Widths, sampling_rows

SLOTS, ROWS, WIDTH, CONTEXT, STEPS, PER_ROW = 6, 3, 8, 40, 4, 5
WIDTHS = Widths(stop_ids=1, bias=0, allowed=0, bad_words=0, bad_word_len=1, logprob_ids=2)
EXEC = ij.Exec(page_size=8, top_logprobs=2)


@dataclasses.dataclass
class Device:
    """A cache and a state of slots, as an engine holds them; page tables are fixed per slot."""

    model: Any
    exec: ij.Exec

    def __post_init__(self) -> None:
        num_pages = 1 + (SLOTS + 1) * PER_ROW
        self.cache = poisoned_cache(self.model, num_pages, self.exec)
        self.tables = shuffled_tables(self.model, SLOTS, PER_ROW, num_pages, seed=3)
        self.state = jax.device_put(state_rows(self.model, [], [], SLOTS, done=True))

    def place(self, index: Any, at: list[int], rows: DecodeState) -> None:
        self.state = slots.place(self.state, np.array(index, np.int32), spread(at), rows)

    def prefill(self, slot: int, tokens: np.ndarray) -> jax.Array:
        """Prefill one slot in rows of WIDTH tokens; return the logits, its own in the last row."""
        parts = [tokens[i : i + WIDTH] for i in range(0, len(tokens), WIDTH)]
        output, self.cache = slots.prefill_rows(
            self.model.params,
            self.cache,
            self.inputs(slot, parts),
            config=self.model.config,
            max_rows=ROWS,
            exec=self.exec,
        )
        assert not np.asarray(output.status).any()
        return output.values

    def inputs(self, slot: int, parts: list[np.ndarray]) -> StepInputs:
        rest = [np.zeros(0, np.int32)] * (ROWS - len(parts))
        arrays: Any = {
            "tokens": padded([*parts, *rest], WIDTH),
            "lengths": np.array([len(part) for part in [*parts, *rest]], np.int32),
            "starts": np.arange(ROWS, dtype=np.int32) * WIDTH,
        }
        tables: Any = tuple(np.repeat(t[slot : slot + 1], ROWS, axis=0) for t in self.tables)
        return StepInputs(**arrays, block_tables=tables)

    def begin(self, logits: jax.Array, at: list[int]) -> Any:
        output, counts, done, self.state = slots.begin(
            logits, self.state, spread(at), config=self.model.config, exec=self.exec
        )
        return output, np.asarray(counts), done

    def decode(self, active: list[bool], limit: int) -> Any:
        size = len(active)
        output, counts, done, self.state, self.cache = slots.decode_slots(
            self.model.params,
            self.cache,
            self.state,
            tuple(table[:size] for table in self.tables),
            np.array(active),
            np.int32(limit),
            config=self.model.config,
            steps=STEPS,
            exec=self.exec,
        )
        return output, np.asarray(counts), done


def spread(at: list[int]) -> np.ndarray:
    return np.array([*at, *[SLOTS] * (ROWS - len(at))], np.int32)


def state_rows(
    model: Any, prompts: list[np.ndarray], requests: list[SamplingParams], size: int, *, done: bool
) -> DecodeState:
    """Return rows as an engine builds them: NumPy arrays, the rest of `size` greedy."""
    rest = size - len(prompts)
    lengths = np.array([*map(len, prompts), *[1] * rest], np.int32)
    sample: Any = {
        "key": np.array([[0, i] for i in range(size)], np.uint32),
        "sample_index": np.zeros(size, np.int32),
        "position": lengths,
        "history": padded([*prompts, *[np.zeros(0, np.int32)] * rest], CONTEXT),
        "history_len": lengths,
        "prompt_len": lengths,
        "forced_len": np.zeros(size, np.int32),
    }
    arrays: Any = {"tokens": np.zeros(size, np.int32), "done": np.full(size, done)}
    sampling = sampling_rows(
        [*requests, *[SamplingParams(temperature=0.0)] * rest],
        vocab_size=model.config.vocab_size,
        widths=WIDTHS,
    )
    return DecodeState(**arrays, sample=SampleState(**sample), sampling=sampling, block_tables=())


def bits(state: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]
