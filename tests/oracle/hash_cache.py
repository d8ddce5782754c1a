"""The hash model's forward pass over a paged cache of 64-bit keys."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hash_model import SPOTS, at_spot, join, turned
from lazy import Violation

from inferjax.config import ModelConfig, cache_groups

ALL_SPOTS = np.array(SPOTS, np.uint64)


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where a dispatch writes and reads in a pool, as flat indices; `visible` masks the reads."""

    written: np.ndarray  # [B, T]
    read: np.ndarray  # [B, C]
    visible: np.ndarray  # bool [B, C]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of rows: `tokens[b, :lengths[b]]` after `starts[b]` others."""

    tokens: np.ndarray  # [B, T]
    starts: np.ndarray  # [B]
    lengths: np.ndarray  # [B]
    tables: tuple[np.ndarray, ...]  # G of [B, M]


class HashCache:
    """A pool [layers, pages, page_size] per cache group, random at the start and never cleaned.

    All rows of a dispatch write a layer's keys before any of them reads, as on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: Sequence[int],
        page_size: int,
        random: np.random.Generator,
    ) -> None:
        self.config, self.num_pages, self.page_size = config, tuple(num_pages), page_size
        self.groups = cache_groups(config)
        self.pools = [
            random.integers(1 << 63, size=(group.num_layers, pages, page_size), dtype=np.uint64)
            for group, pages in zip(self.groups, num_pages, strict=True)
        ]
        # Per layer: its group, and which of the group's layers it is.
        order = [spec.group for spec in config.layers]
        self.layers = [(group, order[:i].count(group)) for i, group in enumerate(order)]

    def copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages; padding copies the trash page onto itself."""
        real = targets != 0
        self._check_pages(group, sources[real])
        self._check_pages(group, targets[real])
        if len(np.unique(targets[real])) < real.sum() or np.isin(sources, targets[real]).any():
            raise Violation(f"copies overlap: {sources} -> {targets}")
        self.pools[group][:, targets] = self.pools[group][:, sources]

    def shift(self, sources: tuple[np.ndarray, ...], targets: tuple[np.ndarray, ...]) -> None:
        """Move pages with every key hashed once more; padding has target 0."""
        for group, (source, target) in enumerate(zip(sources, targets, strict=True)):
            real = target != 0
            self._check_pages(group, source[real])
            self._check_pages(group, target[real])
            if len(np.unique(target[real])) < real.sum():
                raise Violation(f"shifts overlap: {source} -> {target}")
            pool = self.pools[group]
            pool[:, target[real]] = turned(pool[:, source[real]])

    def forward(self, batch: Batch) -> np.ndarray:
        """Write the tokens' keys, read all they see, and return the final hidden values [B, T]."""
        offset = np.arange(batch.tokens.shape[1])[None]
        inside = offset < batch.lengths[:, None]
        positions = np.where(inside, batch.starts[:, None] + offset, 0).astype(np.int64)
        self._check_rows(batch, positions, inside)
        places = [self._places(group, batch, positions, inside) for group in range(len(self.pools))]
        width = places[0].read.shape[1]
        rows, spots = np.arange(len(positions))[:, None], ALL_SPOTS[None, :width]
        hidden = join(
            np.where(inside, batch.tokens, 0).astype(np.uint64), positions.astype(np.uint64)
        )
        for layer, (group, index) in enumerate(self.layers):
            at, pool = places[group], self.pools[group][index].reshape(-1)
            pool[at.written[inside]] = join(hidden, layer)[inside]
            values = np.where(at.visible, at_spot(pool[at.read], spots), np.uint64(0))
            sums = np.zeros((len(values), width + 1), np.uint64)
            np.cumsum(values, axis=1, out=sums[:, 1:])
            first = np.maximum(positions + 1 - (self.groups[group].window or width), 0)
            hidden = join(hidden, sums[rows, positions + 1] - sums[rows, first])
        return hidden

    def _places(
        self, group: int, batch: Batch, positions: np.ndarray, inside: np.ndarray
    ) -> Places:
        size, table, window = self.page_size, batch.tables[group], self.groups[group].window
        ends = batch.starts + batch.lengths
        width = max(int(ends.max()), 1)
        num_pages = -(-width // size)
        if num_pages > table.shape[1]:
            raise Violation(f"{width} tokens in a table of {table.shape[1]} pages")
        flat = table[:, :num_pages, None].astype(np.int64) * size + np.arange(size)
        flat = flat.reshape(len(table), -1)
        spots = np.arange(width)[None]
        oldest = batch.starts - window + 1 if window else np.zeros_like(batch.starts)
        visible = (spots >= oldest[:, None]) & (spots < ends[:, None]) & inside[:, :1]
        read, written = flat[:, :width], flat[np.arange(len(flat))[:, None], positions]
        self._check_pages(group, read[visible] // size)
        used = written[inside]
        if len(np.unique(used)) < len(used):
            raise Violation(f"group {group}: two rows write to the same place")
        return Places(written, np.where(visible, read, 0), visible)

    def _check_pages(self, group: int, pages: np.ndarray) -> None:
        last = self.num_pages[group] - 1
        if len(pages) and (pages.min() < 1 or pages.max() > last):
            raise Violation(f"group {group}: pages {np.unique(pages)} outside 1 to {last}")

    def _check_rows(self, batch: Batch, positions: np.ndarray, inside: np.ndarray) -> None:
        lengths, starts, width = batch.lengths, batch.starts, batch.tokens.shape[1]
        if ((lengths < 0) | (lengths > width) | (starts < 0)).any():
            raise Violation(f"starts {starts} and lengths {lengths} of rows of {width}")
        if (positions >= self.config.max_context).any():
            raise Violation(f"positions beyond the context of {self.config.max_context}")
        tokens = batch.tokens[inside]
        if ((tokens < 0) | (tokens >= self.config.vocab_size)).any():
            raise Violation(f"tokens outside the vocabulary: {tokens}")
