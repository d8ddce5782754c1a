"""How an engine is deployed: sizes and policies, fixed when it starts."""

import dataclasses
from typing import Any, ClassVar

from inferjax.config import check_setting
from inferjax.engine.overflow import OVERFLOWS
from inferjax.errors import UnsupportedConfig
from inferjax.kv.eviction import EVICTIONS
from inferjax.sampling.widths import Widths

LARGEST_SIZE = 1 << 24
SMALLEST_SIZES = {
    "max_running": 1,
    "token_budget": 1,
    "row_tokens": 1,
    "decode_steps": 1,
    "sink_tokens": 0,
    "max_logprobs": 0,
    "priority_window": 0,
    "max_waiting": 1,
    "max_samples": 1,
}
OPTIONAL_SIZES = ("max_len", "num_pages", "cache_bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Deployment settings; requests and checkpoints have their own.

    max_running: sequences that run at the same time. max_waiting: requests that may wait for them.
    max_len: tokens a sequence may have, prompt included; None is the model's context.
    num_pages: pages of the pool, the trash page included, scaled down for window groups; None
      takes what `cache_bytes` buys. cache_bytes: memory of the cache; None is enough for
      `max_running` sequences of `max_len`, but on a CPU at most 1 GiB, elsewhere at most 85 % of
      what is free.
    token_budget: tokens of one step, one for every decoding sequence and the rest for prefill.
    row_tokens: tokens of a row of a prefill; prompts are cut into rows.
    decode_steps: tokens that every sequence draws in one dispatch.
    prefill_buckets, decode_buckets: rows of a prefill and sequences of a decode that are compiled,
      ascending; the largest are added. None is the powers of two. Fewer compile sooner, and pad
      more.
    overflow: what becomes of a request that needs more than `max_len`: "refuse" it, or
      "lossy_sinks": when a sequence is full, the older half of what follows its first `sink_tokens`
      (whole pages) is dropped, and `Usage.dropped_tokens` says how much. Quality is lost.
    prefix_caching: keep full pages after their sequence has ended, for prompts that start alike.
    eviction: which of these pages goes first.
    priority_window: a request of priority p waits as if it had come p times this many requests
      later; so a lower number goes first, and nobody starves.
    max_samples: the most samples (`n`) of one request. max_logprobs: the most likely tokens that
      can be reported. widths: the longest lists of ids that requests may have.
    overlap: plan the next step while the device works on the last.
    seed: makes the seeds of requests without one reproducible; None takes them from the system.
    strict: raise when anything is compiled after the warm-up, instead of counting and logging it.

    Raises: UnsupportedConfig.
    """

    # The checks below give typed errors; a type checker at run time would come before them.
    __no_type_check__: ClassVar[bool] = True

    max_running: int = 16
    max_waiting: int = 100_000
    max_len: int | None = None
    num_pages: int | None = None
    cache_bytes: int | None = None
    token_budget: int = 512
    row_tokens: int = 32
    decode_steps: int = 8
    prefill_buckets: tuple[int, ...] | None = None
    decode_buckets: tuple[int, ...] | None = None
    overflow: str = "refuse"
    sink_tokens: int = 64
    prefix_caching: bool = True
    eviction: str = "lru"
    priority_window: int = 1000
    max_samples: int = 64
    max_logprobs: int = 5
    widths: Widths = Widths()
    overlap: bool = True
    seed: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that could not run."""
        for name, smallest in SMALLEST_SIZES.items():
            check_setting(self, name, smallest, LARGEST_SIZE)
        for name in OPTIONAL_SIZES:
            if getattr(self, name) is not None:
                check_setting(self, name, 1, 1 << 50 if name == "cache_bytes" else LARGEST_SIZE)
        for name in ("prefill_buckets", "decode_buckets"):
            self._check_buckets(name, getattr(self, name))
        for name in ("prefix_caching", "overlap", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedConfig(f"{name}={getattr(self, name)!r}", fix="use True or False")
        for name, known in (("eviction", EVICTIONS), ("overflow", OVERFLOWS)):
            value = getattr(self, name)
            if value not in known:
                raise UnsupportedConfig(f"{name}={value!r}", fix=f"use one of {', '.join(known)}")
        if self.seed is not None:
            check_setting(self, "seed", 0, 2**64 - 1)
        if not isinstance(self.widths, Widths):
            raise UnsupportedConfig(f"widths={self.widths!r}", fix="give a Widths(...)")
        if self.num_pages is not None and self.cache_bytes is not None:
            raise UnsupportedConfig(
                "both num_pages and cache_bytes", why="either decides", fix="leave one out"
            )

    def _check_buckets(self, name: str, value: Any) -> None:
        whole = value is None or (isinstance(value, tuple) and all(type(n) is int for n in value))
        if not whole or (value and (value[0] < 1 or list(value) != sorted(set(value)))):
            raise UnsupportedConfig(
                f"{name}={value!r}",
                why="it is None, or a tuple of ascending sizes from 1 on",
                fix="for example (1, 4, 16)",
            )

    @property
    def max_rows(self) -> int:
        """R_max, the rows of the largest prefill."""
        return max(1, self.token_budget // self.row_tokens)
