"""Random traffic through an engine over the oracle, with every account checked after each step."""

import collections
import dataclasses
from typing import Any

import numpy as np
from accounts import Accounts
from rig import Rig, Wish, check_completion, tokens_of, truth

from inferjax.engine import Completion, Delta, Tokens
from inferjax.engine.sequence import Phase
from inferjax.engine.track import joined
from inferjax.sampling import SamplingParams

SALTS = (None, None, None, "tenant")


class Traffic:
    """Random requests whose prompts are nodes of a tree with a tail of their own."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vocab, self.max_len = rig.config.vocab_size, rig.engine.max_len
        self.max_samples = 4
        self.tree: list[tuple[int, ...]] = [()]
        while len(self.tree) < 12:
            parent = self.tree[self.random.integers(len(self.tree))]
            self.tree.append(parent + self._tokens(self.random.integers(1, 17)))

    def wish(self) -> Wish:
        """Return a request that fits."""
        node = self.tree[self.random.integers(len(self.tree))]
        prompt = (node + self._tokens(self._below(13)))[: min(60, self.max_len - 1)]
        prompt = prompt or self._tokens(1)
        sampling = self._sampling(self.max_len - len(prompt))
        salt = SALTS[self._below(len(SALTS))]
        return Wish(prompt, sampling, int(self.random.integers(-2, 3)), salt)

    def _sampling(self, room: int) -> SamplingParams:
        greedy = self._chance(0.3)
        longest = min(room, 40 if self._chance(0.3) else 12)
        fields: dict[str, Any] = {
            "temperature": 0.0 if greedy else float(self.random.choice([0.5, 1.0])),
            "n": 1 if greedy or self._chance(0.7) else int(self.random.integers(2, 5)),
            "max_tokens": int(self.random.integers(0, longest + 1)),
            "seed": int(self.random.integers(1 << 62)),
            "ignore_eos": self._chance(0.3),
        }
        if self._chance(0.3):
            fields["min_tokens"] = self._below(fields["max_tokens"] + 1)
        if self._chance(0.2):
            fields["stop_token_ids"] = self._tokens(3)
        if self._chance(0.2):
            fields["logprobs"] = self._below(4)
        if self._chance(0.1):
            fields["logprob_token_ids"] = self._tokens(2)
        if self._chance(0.1) and fields["max_tokens"]:
            fields["forced_token_ids"] = self._tokens(1 + self._below(min(5, fields["max_tokens"])))
        if self._chance(0.08):
            fields["prompt_logprobs"] = self._below(3)
        return SamplingParams(**fields)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.integers(3, self.vocab, count).tolist())

    def _below(self, limit: int) -> int:
        return int(self.random.integers(limit))

    def _chance(self, share: float) -> bool:
        return bool(self.random.random() < share)


@dataclasses.dataclass(slots=True)
class Guest:
    """A request under way: what it wants, what has come, and when it is to be aborted."""

    wish: Wish
    streamed: list[list[Tokens]]
    ended: list[bool]
    patience: int | None = None
    doomed_in: Phase | None = None


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a soak has seen."""

    steps: int = 0
    finished: int = 0
    aborted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    preemptions: int = 0
    hit_tokens: int = 0
    copies: int = 0


class Soak:
    """Drives `num_requests` through a rig, about `crowd` at a time, aborting every other one."""

    def __init__(
        self, rig: Rig, *, num_requests: int, seed: int, crowd: int = 12, abort_share: float = 0.5
    ) -> None:
        self.rig, self.crowd, self.abort_share = rig, crowd, abort_share
        self.left = num_requests
        self.random = np.random.default_rng((seed, 1))
        self.traffic, self.accounts = Traffic(rig, seed), Accounts(rig)
        self.guests: dict[str, Guest] = {}
        self.gone: set[str] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run until everything has ended."""
        most = 60 * self.left + 500
        while self.left or self.guests:
            self._submit()
            self._abort()
            if self.rig.engine.has_work:
                self.step()
            assert self.outcome.steps < most, "requests starve"
        while self.rig.engine.has_work:
            self.step()
        self.accounts.check_end()
        totals = self.rig.engine.stats().totals
        self.outcome.preemptions = totals.preemptions
        self.outcome.hit_tokens = totals.prefix_hit_tokens
        return self.outcome

    def step(self) -> None:
        """Make a step and check everything."""
        self.take(self.rig.engine.step())
        self.outcome.steps += 1
        self.accounts.check()
        if self.random.random() < 0.05:
            self.accounts.check_contents()

    def take(self, deltas: list[Delta]) -> None:
        """Collect what was streamed; ends are compared with the truth."""
        for delta in deltas:
            assert delta.request_id not in self.gone, "an aborted request speaks"
            guest = self.guests[delta.request_id]
            assert not guest.ended[delta.index]
            guest.streamed[delta.index].append(delta.tokens)
            guest.ended[delta.index] = delta.finish_reason is not None
            if delta.completion is not None:
                self._finished(guest, delta.completion)
                del self.guests[delta.request_id]

    def _finished(self, guest: Guest, completion: Completion) -> None:
        assert all(guest.ended)
        for parts, sample in zip(guest.streamed, completion.samples, strict=True):
            assert joined(parts) == sample.tokens
        check_completion(self.rig, guest.wish, completion)
        self.outcome.finished += 1

    def _submit(self) -> None:
        """Let a burst arrive when the house is not full."""
        if len(self.guests) >= self.crowd or self.random.random() < 0.4:
            return
        for _ in range(min(self.left, int(self.random.integers(1, self.crowd + 1)))):
            wish = self.traffic.wish()
            name = wish.submit(self.rig)
            self.accounts.entered()
            num_samples = wish.sampling.n
            guest = Guest(wish, [[] for _ in range(num_samples)], [False] * num_samples)
            if self.random.random() < self.abort_share:
                guest.patience = int(self.random.integers(0, 12))
                phases = (Phase.WAITING, Phase.PREFILL, Phase.DECODE, None, None)
                guest.doomed_in = phases[self.random.integers(len(phases))]
            self.guests[name] = guest
            self.left -= 1

    def _abort(self) -> None:
        for name, guest in list(self.guests.items()):
            if guest.patience is None:
                continue
            track = self.accounts.requests[name]
            phases = {sample.sequence.phase for sample in track.samples}
            guest.patience -= 1
            if guest.patience < 0 or (guest.doomed_in in phases and self.random.random() < 0.5):
                flying = any(sample.sequence.in_flight for sample in track.samples)
                self.outcome.aborted["in flight" if flying else "idle"] += 1
                for phase in phases:
                    self.outcome.aborted[phase.value] += 1
                self.abort(name)

    def abort(self, name: str) -> None:
        """Abort a request; what it has must be the start of the truth."""
        guest = self.guests.pop(name)
        completion = self.rig.engine.abort(name)
        self.gone.add(name)
        self.accounts.check()
        right = truth(self.rig, guest.wish)
        for sample, drawn, parts in zip(completion.samples, right, guest.streamed, strict=True):
            start = drawn[: len(sample.token_ids)]
            assert sample.tokens == tokens_of(start, guest.wish.sampling)
            assert sample.tokens == joined(parts)
            ended = guest.ended[sample.index]
            assert ended == (sample.finish_reason != "abort")
