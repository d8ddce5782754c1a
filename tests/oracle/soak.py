"""Random traffic through an engine over the oracle, with every account checked after each step."""

import collections
import dataclasses
from typing import Any

import numpy as np
from house import House
from rig import Rig, Wish

from inferjax.engine.sequence import Phase
from inferjax.sampling import SamplingParams

SALTS = (None, None, None, "tenant")


class Traffic:
    """Random requests whose prompts are nodes of a tree with a tail of their own."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vocab, self.max_len = rig.config.vocab_size, rig.engine.max_len
        self.tree: list[tuple[int, ...]] = [()]
        while len(self.tree) < 12:
            parent = self.tree[self.random.integers(len(self.tree))]
            self.tree.append(parent + self._tokens(self.random.integers(1, 17)))

    def wish(self) -> Wish:
        """Return a request that fits; a third begin short and go on for long."""
        long = self._chance(0.33)
        node = self.tree[self._below(len(self.tree))][: 9 if long else None]
        prompt = (node + self._tokens(self._below(13)))[: min(60, self.max_len - 1)]
        prompt = prompt or self._tokens(1)
        sampling = self._sampling(self.max_len - len(prompt), long)
        salt = SALTS[self._below(len(SALTS))]
        return Wish(prompt, sampling, int(self.random.integers(-2, 3)), salt)

    def _sampling(self, room: int, long: bool) -> SamplingParams:
        greedy = self._chance(0.3)
        longest = min(room, 60 if long else 12)
        fields: dict[str, Any] = {
            "temperature": 0.0 if greedy else float(self.random.choice([0.5, 1.0])),
            "n": 1 if greedy or self._chance(0.7) else int(self.random.integers(2, 5)),
            "max_tokens": int(self.random.integers(longest // 2 if long else 0, longest + 1)),
            "ignore_eos": long or self._chance(0.3),
            "seed": int(self.random.integers(1 << 62)),
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
class Doom:
    """When a request is aborted: after some steps, or in a phase it comes to before."""

    patience: int
    phase: Phase | None


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a soak has seen; `aborted` counts sequences' phases, and if work was under way."""

    steps: int
    finished: int
    aborted: collections.Counter[str]
    preemptions: int
    hit_tokens: int


class Soak:
    """Drives `num_requests` through a rig, about `crowd` at a time, and aborts every other.

    `fault_share` is the share of steps in which the device fails.
    """

    def __init__(
        self,
        rig: Rig,
        *,
        num_requests: int,
        seed: int,
        crowd: int = 12,
        abort_share: float = 0.5,
        fault_share: float = 0.0,
    ) -> None:
        self.house, self.traffic = House(rig), Traffic(rig, seed)
        self.random = np.random.default_rng((seed, 1))
        self.crowd, self.room, self.abort_share = crowd, crowd, abort_share
        self.left, self.fault_share = num_requests, fault_share
        self.most = 60 * num_requests + 500
        self.dooms: dict[str, Doom] = {}
        self.aborted: collections.Counter[str] = collections.Counter()

    def run(self) -> Outcome:
        """Run until everything has ended."""
        house, engine = self.house, self.house.rig.engine
        while self.left or house.guests:
            self._submit()
            self._abort()
            if engine.has_work:
                self._step()
            assert house.num_steps < self.most, "requests starve"
        house.run(most=self.most)
        totals = engine.stats().totals
        return Outcome(
            steps=house.num_steps,
            finished=totals.finished,
            aborted=self.aborted,
            preemptions=totals.preemptions,
            hit_tokens=totals.prefix_hit_tokens,
        )

    def _step(self) -> None:
        oracle = self.house.rig.oracle
        if self.random.random() < self.fault_share:
            faults = (oracle.faults, oracle.read_faults)[self.random.integers(2)]
            faults[oracle.num_dispatches] = RuntimeError("the device is gone")
        try:
            self.house.step()
        except RuntimeError:
            # What was planned but not dispatched is forgotten by the next step.
            self.house.num_steps += 1
            return
        if self.random.random() < 0.05:
            self.house.accounts.check_contents()

    def _submit(self) -> None:
        """Let a burst arrive when there is room; now and then the hour is busier or quieter."""
        if self.random.random() < 0.05:
            self.room = int(self.random.integers(1, self.crowd + 1))
        if len(self.house.guests) >= self.room or self.random.random() < 0.4:
            return
        burst = min(self.left, self.room, int(self.random.integers(1, self.crowd + 1)))
        for _ in range(burst):
            name = self.house.enter(self.traffic.wish())
            if self.random.random() < self.abort_share:
                self.dooms[name] = self._doom()
        self.left -= burst

    def _doom(self) -> Doom:
        phases = (Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.DECODE, None)
        phase = phases[self.random.integers(len(phases))]
        return Doom(60 if phase else int(self.random.integers(0, 30)), phase)

    def _abort(self) -> None:
        for name, doom in list(self.dooms.items()):
            if name not in self.house.guests:
                del self.dooms[name]
                continue
            sequences = [s.sequence for s in self.house.accounts.requests[name].samples]
            phases = {sequence.phase for sequence in sequences}
            doom.patience -= 1
            if doom.patience < 0 or (doom.phase in phases and self.random.random() < 0.3):
                self.aborted.update(phase.value for phase in phases)
                self.aborted["in flight"] += any(sequence.in_flight for sequence in sequences)
                self.house.abort(name)
                del self.dooms[name]
