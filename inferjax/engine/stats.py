"""What an engine shows of itself: totals since its start, and what is so at this moment."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """Totals since the engine started. Rows and tokens are those of dispatches.

    `prompt_tokens` counts prompts as they are admitted the first time, once per sample, and
    `prefix_hit_tokens` those of them found in the cache or shared with an earlier sample;
    `prefill_tokens` is what prefills computed, recomputation included.
    `padded_tokens` are places of a prefill that held no token; `decode_rows` are rows of decode
    steps that were asked for, `padded_rows` those without a sequence. `shifts` are
    sequences that dropped their middle. `collect_s` includes waiting for the device.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0
    generated_tokens: int = 0
    decode_rows: int = 0
    padded_rows: int = 0
    preemptions: int = 0
    shifts: int = 0
    extend_dispatches: int = 0
    decode_dispatches: int = 0
    recoveries: int = 0
    plan_s: float = 0.0
    dispatch_s: float = 0.0
    collect_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A moment of the engine: gauges, page accounts per cache group, totals, compilations.

    `pages_live` belong to sequences, `pages_cached` could be given to others at once,
    `pages_free` hold nothing.
    """

    running: int
    waiting: int
    pages_live: tuple[int, ...]
    pages_cached: tuple[int, ...]
    pages_free: tuple[int, ...]
    totals: Counters
    compilations: int
    compile_s: float
    late_compilations: int

    @property
    def prefill_padding(self) -> float:
        """The share of prefilled places that held no token."""
        return _share(self.totals.padded_tokens, self.totals.prefill_tokens)

    @property
    def decode_padding(self) -> float:
        """The share of decoded rows that belonged to no sequence."""
        return _share(self.totals.padded_rows, self.totals.decode_rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sample of a request at this moment, for people who watch.

    phase: "waiting", "prefill" or "decode". slot: its row in the decode state, None without one.
    num_tokens: prompt and output collected so far. pages: its block table in every cache group;
    entry j is the page of tokens [j * page_size, ...), 0 where a window has left it. A page in
    several tables is shared.
    """

    request_id: str
    index: int
    phase: str
    slot: int | None
    prompt_tokens: int
    num_tokens: int
    num_preemptions: int
    pages: tuple[tuple[int, ...], ...]


def _share(waste: int, use: int) -> float:
    return waste / (waste + use) if waste else 0.0
