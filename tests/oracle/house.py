"""The guests of an engine over the oracle, all of whom are watched."""

import dataclasses

from accounts import Accounts
from rig import Rig, Wish, check_completion, tokens_of, truth

from inferjax.engine import Completion, Delta, Tokens
from inferjax.engine.track import joined


@dataclasses.dataclass(slots=True)
class Guest:
    """A request under way: what it wants, what has been streamed, which samples have ended."""

    wish: Wish
    streamed: list[list[Tokens]]
    ended: list[bool]


class House:
    """Submits, steps and aborts; checks what is streamed, how requests end, and the accounts.

    With `gaps`, something may be missing in the stream: an interrupt fell between two of its lines.
    """

    def __init__(self, rig: Rig, *, gaps: bool = False) -> None:
        self.rig, self.accounts, self.gaps = rig, Accounts(rig), gaps
        self.guests: dict[str, Guest] = {}
        self.gone: set[str] = set()
        self.completions: dict[str, Completion] = {}
        self.num_steps = 0

    def enter(self, wish: Wish, name: str | None = None) -> str:
        """Submit a request."""
        name = wish.submit(self.rig, name)
        self.accounts.entered()
        count = wish.sampling.n
        self.guests[name] = Guest(wish, [[] for _ in range(count)], [False] * count)
        self.gone.discard(name)
        return name

    def step(self) -> None:
        """Make a step and check everything but the contents of pages."""
        self._take(self.rig.engine.step())
        self.num_steps += 1
        self.accounts.check()

    def run(self, most: int = 1000) -> None:
        """Step until nothing is left to do."""
        while self.rig.engine.has_work:
            self.step()
            self.accounts.check_contents()
            assert self.num_steps < most, "requests starve"
        assert not self.guests
        self.accounts.check_end()

    def abort(self, name: str) -> None:
        """Abort a request; what it has must be the start of the truth."""
        guest = self.guests.pop(name)
        completion = self.rig.engine.abort(name)
        self.gone.add(name)
        self.accounts.check()
        for sample, parts in zip(completion.samples, guest.streamed, strict=True):
            drawn = truth(self.rig, guest.wish, sample.index, len(sample.token_ids))
            assert sample.tokens == tokens_of(drawn, guest.wish.sampling)
            assert sample.tokens == joined(parts)
            assert guest.ended[sample.index] == (sample.finish_reason != "abort")

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.gone, "an aborted request speaks"
            guest = self.guests[delta.request_id]
            assert not guest.ended[delta.index]
            guest.streamed[delta.index].append(delta.tokens)
            guest.ended[delta.index] = delta.finish_reason is not None
            if delta.completion is not None:
                self._finish(guest, delta.completion)
                self.completions[delta.request_id] = delta.completion
                del self.guests[delta.request_id]

    def _finish(self, guest: Guest, completion: Completion) -> None:
        for parts, sample in zip(guest.streamed, completion.samples, strict=True):
            if self.gaps:
                rest = iter(sample.token_ids)
                assert all(token in rest for token in joined(parts).ids)
            else:
                assert joined(parts) == sample.tokens
                assert guest.ended[sample.index]
        check_completion(self.rig, guest.wish, completion)
