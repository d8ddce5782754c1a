"""The decode state of the hash model: rows that draw tokens from hidden values."""

import numpy as np
from hash_cache import ALL_SPOTS
from hash_model import (
    at_spot,
    logprob,
    pick,
    randomized,
    rules_of,
    seed_of,
    top_id,
)
from lazy import Violation

from inferjax.config import ModelConfig
from inferjax.engine.dispatch import Drawn, Rows
from inferjax.sampling import SamplingParams

IDLE = rules_of(SamplingParams(), ())
MOVED = (
    "tokens",
    "keys",
    "sample_index",
    "history",
    "lengths",
    "prompt_lens",
    "forced_lens",
    "done",
    "rules",
    "chosen",
)


class HashSlots:
    """N rows with a history of C tokens; what nobody has written is out of range."""

    def __init__(self, config: ModelConfig, num_slots: int, capacity: int, top: int) -> None:
        self.config, self.num_slots, self.top = config, num_slots, top
        self.tokens = np.full(num_slots, -7, np.int64)
        self.keys = np.zeros(num_slots, np.uint64)
        self.sample_index = np.zeros(num_slots, np.uint64)
        self.history = np.full((num_slots, capacity), -7, np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.prompt_lens = np.zeros(num_slots, np.int64)
        self.forced_lens = np.zeros(num_slots, np.int64)
        self.done = np.ones(num_slots, np.bool_)
        self.rules = np.full(num_slots, IDLE, object)
        self.chosen = np.full(num_slots, None, object)

    def place(self, rows: Rows) -> None:
        """Slot s takes what `index[s]` held, then the new rows are written."""
        for name in MOVED:
            setattr(self, name, getattr(self, name)[rows.index])
        live = [slot for slot in rows.slots.tolist() if slot < self.num_slots]
        if len(set(live)) < len(live) or len(live) != len(rows.sampling):
            raise Violation(f"slots {rows.slots} for {len(rows.sampling)} rows")
        for i, slot in enumerate(rows.slots.tolist()):
            if slot < self.num_slots:
                self._write(rows, i, slot)

    def _write(self, rows: Rows, i: int, slot: int) -> None:
        high, low = map(int, rows.keys[i])
        self.tokens[slot] = rows.tokens[i]
        self.keys[slot] = high << 32 | low
        self.sample_index[slot] = rows.sample_index[i]
        self.history[slot] = rows.history[i]
        self.lengths[slot] = rows.lengths[i]
        self.prompt_lens[slot] = rows.prompt_lens[i]
        self.forced_lens[slot] = rows.forced_lens[i]
        self.done[slot] = False
        self.rules[slot] = rules_of(rows.sampling[i], self.config.eos_ids)
        self.chosen[slot] = np.array(rows.sampling[i].logprob_token_ids, np.uint64)

    def draw(
        self, out: Drawn, step: int, rows: np.ndarray, slots: np.ndarray, hidden: np.ndarray
    ) -> None:
        """Draw the next token of `slots` and report it in `rows` of `out`, at place `step`."""
        if not len(rows):
            return
        seed = self._seeds(slots, hidden)
        tokens = self._pick(slots, seed)
        drawn, ids = tokens.astype(np.uint64), self.top_ids(hidden)
        out.tokens[rows, step] = tokens
        out.logprobs[rows, step] = logprob(hidden, drawn)
        out.sampled_logprobs[rows, step] = np.where(self._greedy(slots), 0, logprob(seed, drawn))
        out.top_ids[rows, step] = ids
        out.top_logprobs[rows, step] = logprob(hidden[:, None], ids)
        out.counts[rows] += 1
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if len(wanted := self.chosen[slot]):
                out.chosen_logprobs[row, step, : len(wanted)] = logprob(hidden[i : i + 1], wanted)
        self._advance(slots, tokens)

    def _advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self.tokens[slots] = tokens
        self.history[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1
        counts = (self.lengths - self.prompt_lens)[slots].tolist()
        for slot, token, count in zip(slots, tokens.tolist(), counts, strict=True):
            rules = self.rules[slot]
            stopped = token in rules.stops and count > rules.min_tokens
            self.done[slot] = stopped or count >= rules.max_tokens

    def _greedy(self, slots: np.ndarray) -> np.ndarray:
        return np.array([self.rules[slot].greedy for slot in slots], np.bool_)

    def _seeds(self, slots: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        lengths = self.lengths[slots]
        width = int(lengths.max())
        known = np.arange(width)[None] < lengths[:, None]
        read = self.history[slots, :width].astype(np.uint64)
        read = at_spot(read, ALL_SPOTS[None, :width])
        history = np.where(known, read, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        numbers = np.array([self.rules[slot].number for slot in slots], np.uint64)
        seed = seed_of(hidden, history, self.prompt_lens[slots].astype(np.uint64), numbers)
        keys, index = self.keys[slots], self.sample_index[slots]
        wild = randomized(seed, keys, index, lengths.astype(np.uint64))
        return np.where(self._greedy(slots), seed, wild)

    def _pick(self, slots: np.ndarray, seed: np.ndarray) -> np.ndarray:
        tokens = np.empty(len(slots), np.int64)
        for i, slot in enumerate(slots.tolist()):
            length, rules = int(self.lengths[slot]), self.rules[slot]
            if length < self.forced_lens[slot]:
                tokens[i] = self.history[slot, length]
                continue
            early = length - self.prompt_lens[slot] < rules.min_tokens
            banned = rules.banned if early else frozenset()
            tokens[i] = pick(int(seed[i]), banned, self.config.vocab_size)
        return tokens

    def top_ids(self, hidden: np.ndarray) -> np.ndarray:
        """Return the ids reported as most likely, [..., n]."""
        ids = [top_id(hidden, rank, self.config.vocab_size) for rank in range(self.top)]
        return np.stack(ids, -1) if ids else np.zeros((*hidden.shape, 0), np.uint64)
