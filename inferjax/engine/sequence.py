"""One sample of a request, as the scheduler sees it: tokens, pages and how far it has come."""

import dataclasses
import enum


class Phase(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Plain values that only the scheduler and the engine change.

    tokens: prompt and collected output, those that were dropped left out, as in `prompt_len`.
    max_len: prompt and the longest possible output, as far as the context reaches. beyond: output
      that it may have past that, for which tokens must be dropped first: see `overflow.py`.
    order: smaller goes first, and is preempted last. root: digest that separates caches which must
      not be shared (salt, adapter). leader: the sequence of the same prompt that this one forks
      from, None for the first.
    pages: page ids per cache group; page j holds tokens [j * page_size, ...); 0 where a window has
      left it. computed: tokens whose keys and values are in the cache once all dispatched work has
      run. ahead: tokens that dispatched work may draw, at most, and that are not collected yet.
    in_flight: dispatches not collected yet. cached: prompt tokens found in the cache at the first
      admission, None before it. registered: leading full pages that the prefix index has seen.
    lost: tokens of the prompt and of the output that were dropped. spliced: the pages hold traces
      of such tokens, so that their contents do not follow from `tokens` alone.
    """

    uid: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    order: int
    root: bytes = b""
    reads_cache: bool = True
    scored: bool = False
    leader: "Sequence | None" = None
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: tuple[list[int], ...] = ()
    digests: list[bytes] = dataclasses.field(default_factory=list)
    computed: int = 0
    ahead: int = 0
    in_flight: int = 0
    cached: int | None = None
    registered: int = 0
    num_preemptions: int = 0
    table_changed: bool = True
    beyond: int = 0
    lost: tuple[int, int] = (0, 0)
    spliced: bool = False

    @property
    def resumed(self) -> bool:
        """Whether output exists: the newest token is known, and its cache place is not filled."""
        return len(self.tokens) > self.prompt_len

    @property
    def prefill_end(self) -> int:
        """Tokens to put into the cache before decoding: all but a newest one that was drawn."""
        return len(self.tokens) - 1 if self.resumed else self.prompt_len

    @property
    def reach(self) -> int:
        """Tokens it has at most when all dispatched work has run."""
        return min(len(self.tokens) + self.ahead, self.max_len)

    @property
    def num_drawn(self) -> int:
        """Output tokens collected, those that were dropped included."""
        return len(self.tokens) - self.prompt_len + self.lost[1]

    @property
    def overflows(self) -> bool:
        """Whether its context is full and more output is to come, with nothing under way."""
        return self.beyond > 0 and len(self.tokens) == self.max_len and not self.in_flight

    def drop(self, start: int, stop: int, context: int) -> None:
        """Take out tokens [start, stop); what then still exceeds `context` tokens is `beyond`."""
        self.digests.clear()
        # A prompt is scored only while it is whole, and then it has been.
        self.scored = self.scored and stop == start
        tokens = self.tokens[:start] + self.tokens[stop:]
        of_prompt = max(0, min(stop, self.prompt_len) - start)
        of_output = stop - start - of_prompt
        end = self.max_len + self.beyond - (stop - start)
        state = (
            tokens,
            self.prompt_len - of_prompt,
            min(end, context),
            max(0, end - context),
            (self.lost[0] + of_prompt, self.lost[1] + of_output),
        )
        # All at once: what breaks off before or after this line leaves a sequence that can go on.
        self.tokens, self.prompt_len, self.max_len, self.beyond, self.lost = state

    def restart(self) -> None:
        """Wait again, without pages or slot, and with nothing under way."""
        self.phase, self.slot, self.pages = Phase.WAITING, -1, ()
        self.digests.clear()
        self.computed = self.registered = self.ahead = self.in_flight = 0
        self.spliced, self.table_changed = False, True
