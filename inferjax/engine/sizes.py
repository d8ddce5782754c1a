"""How large an engine's parts are: pages per pool, the longest sequence, the compiled shapes."""

import bisect
import dataclasses

import jax

from inferjax.checkpoint.load import Model
from inferjax.config import CacheGroup, Exec, cache_groups
from inferjax.engine.buckets import BucketPlan, sizes_up_to
from inferjax.engine.config import EngineConfig
from inferjax.engine.overflow import Middle, middle_of
from inferjax.engine.pages import SequencePages
from inferjax.engine.scheduler import Limits, Scheduler
from inferjax.errors import OutOfPages, UnsupportedConfig
from inferjax.kv.cache import group_bytes
from inferjax.kv.eviction import EVICTIONS
from inferjax.kv.pool import PagePool

CPU_CACHE_BYTES = 1 << 30
SHARE_OF_FREE_MEMORY = 0.85


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that follow from model, deployment and device.

    `windows` are those that pages leave, one per cache group, None to keep all. `middle` is what a
    sequence that outgrows `max_len` drops, None where that is refused.
    """

    page_size: int
    num_pages: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_len: int
    buckets: BucketPlan
    middle: Middle | None = None

    @property
    def pages_per_row(self) -> int:
        """M, the entries of a block table."""
        return -(-self.max_len // self.page_size)


def make_sizes(model: Model, config: EngineConfig, exec: Exec) -> Sizes:
    """Return the sizes of an engine.

    `max_len` is what was asked for, or less: the longest sequence that fits the pools alone.

    Raises: OutOfPages when not even a short one does, UnsupportedConfig when sequences are to
    outgrow their context and cannot.
    """
    groups = cache_groups(model.config)
    while True:
        sizes = _sizes_of(model, groups, config, exec)
        kept = tuple(_with_sinks(group, sizes.middle) for group in groups)
        if kept == groups:
            return sizes
        groups = kept


def _with_sinks(group: CacheGroup, middle: Middle | None) -> CacheGroup:
    """Return a group that keeps all pages if its window, after a drop, reaches the sinks again."""
    wide = middle is not None and group.window is not None and group.window > middle.num_recent
    return dataclasses.replace(group, window=None) if wide else group


def _sizes_of(
    model: Model, groups: tuple[CacheGroup, ...], config: EngineConfig, exec: Exec
) -> Sizes:
    longest = min(config.max_len or model.config.max_context, model.config.max_context)
    sizes = Sizes(
        page_size=exec.page_size,
        num_pages=_num_pages(model, groups, longest, config, exec),
        windows=tuple(group.window for group in groups),
        max_len=longest,
        buckets=BucketPlan(
            prefill_rows=sizes_up_to(config.max_rows, config.prefill_buckets),
            decode_slots=sizes_up_to(config.max_running, config.decode_buckets),
            row_tokens=config.row_tokens,
            num_layers=model.config.num_layers,
            num_groups=len(groups),
            shifts=config.overflow != "refuse",
        ),
    )
    scheduler = make_scheduler(sizes, config)
    # The newest token of a sequence is never written.
    fits = bisect.bisect_left(range(1, longest), True, key=scheduler.never_fits)
    if not fits:
        raise OutOfPages(
            f"pools of {sizes.num_pages} pages hold no sequence at all",
            why="a step's tokens, and a window's, must have pages beside the trash page",
            fix="give more pages or cache_bytes, or a smaller token_budget",
        )
    middle = None
    if config.overflow != "refuse":
        _check_positions(model)
        middle = middle_of(fits + 1, config.sink_tokens, exec.page_size)
    return dataclasses.replace(sizes, max_len=fits + 1, middle=middle)


def _check_positions(model: Model) -> None:
    if model.config.learned_positions is not None:
        raise UnsupportedConfig(
            f"overflow for a {model.config.family} model",
            why="its positions are learned and added to the tokens: cached keys cannot move",
            fix='use overflow="refuse", or a model with rotary positions',
        )


def make_scheduler(sizes: Sizes, config: EngineConfig) -> Scheduler:
    """Return a scheduler over empty pools."""
    pools = tuple(PagePool(n, EVICTIONS[config.eviction]()) for n in sizes.num_pages)
    pages = SequencePages(
        pools, sizes.windows, sizes.page_size, prefix_caching=config.prefix_caching
    )
    return Scheduler(pages, _limits(sizes, config), middle=sizes.middle)


def _limits(sizes: Sizes, config: EngineConfig) -> Limits:
    return Limits(
        max_running=config.max_running,
        token_budget=config.token_budget,
        row_tokens=config.row_tokens,
        max_rows=config.max_rows,
        decode_steps=config.decode_steps,
        buckets=sizes.buckets.decode_slots,
    )


def _num_pages(
    model: Model,
    groups: tuple[CacheGroup, ...],
    longest: int,
    config: EngineConfig,
    exec: Exec,
) -> tuple[int, ...]:
    """Return the pages of every group: as many as could be used, or what memory allows."""
    wanted = [_wanted_pages(group, longest, config, exec.page_size) for group in groups]
    if config.num_pages is not None:
        pairs = zip(groups, wanted, strict=True)
        return tuple(
            min(config.num_pages, 1 + n) if g.window else config.num_pages for g, n in pairs
        )
    page_bytes = _page_bytes(model, groups, exec)
    total = sum(n * size for n, size in zip(wanted, page_bytes, strict=True))
    share = min(1.0, (config.cache_bytes or _free_bytes()) / total)
    return tuple(1 + max(1, int(n * share)) for n in wanted)


def _wanted_pages(group: CacheGroup, longest: int, config: EngineConfig, page_size: int) -> int:
    """Return the pages that let `max_running` of the longest sequences run.

    A window needs its own tokens and those of a step; half as much again is left to the cache.
    """
    per_sequence = -(-longest // page_size)
    if group.window is not None:
        step = max(config.max_rows * config.row_tokens, 2 * config.decode_steps)
        touched = -(-(group.window + step) // page_size) + 2
        per_sequence = min(per_sequence, touched * 3 // 2)
    return per_sequence * config.max_running


def _page_bytes(model: Model, groups: tuple[CacheGroup, ...], exec: Exec) -> list[int]:
    kind = exec.kv_dtype or (str(model.params.embed.dtype) if model.params else model.config.dtype)
    return [group_bytes(group, exec.page_size, kind) for group in groups]


def _free_bytes() -> int:
    """Return what a cache may take when nobody says: most of what an accelerator has free."""
    facts = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in facts:
        return CPU_CACHE_BYTES
    return int((facts["bytes_limit"] - facts.get("bytes_in_use", 0)) * SHARE_OF_FREE_MEMORY)
