"""What must hold after every step of an engine: pages, slots, queues and the cache's contents."""

import collections

import numpy as np
from expected import page_contents
from rig import Rig

from inferjax.engine.sequence import Phase, Sequence


class Accounts:
    """Checks one rig; `check` after every step, `entered` after every submit."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        core = rig.engine._core
        self.scheduler, self.tracks = core.scheduler, core.collector.tracks
        self.requests = core.collector.requests
        self.pages = self.scheduler.pages
        self.size = self.pages.page_size
        self.known: dict[int, Sequence] = {}
        # Digest of a page -> root and tokens up to its end, and what the page must hold.
        self.named: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.contents: dict[bytes, list[list[int]]] = {}

    def entered(self) -> None:
        """Take note of new sequences: one may come and go within a step."""
        for uid in reversed(self.tracks):
            if uid in self.known:
                break
            self.known[uid] = self.tracks[uid].sequence

    def check(self) -> None:
        """Check everything that needs no look at the device."""
        assert self.rig.oracle.queue.violations == []
        self._note_digests()
        known = [track.sequence for track in self.tracks.values()]
        for sequence in known:
            self._check_sequence(sequence)
        live = [sequence for sequence in known if sequence.phase is not Phase.FINISHED]
        self._check_gauges(live)
        for group in range(len(self.pages.pools)):
            self._check_pool(group, live)

    def check_contents(self) -> None:
        """Let the device run all it has, and compare every registered page with the truth."""
        oracle = self.rig.oracle
        oracle.queue.flush()
        layers = [spec.group for spec in self.rig.config.layers]
        for group, pool in enumerate(self.pages.pools):
            mine = [layer for layer, at in enumerate(layers) if at == group]
            for digest, page in pool._index.items():
                keys = self._keys(digest)
                right = np.array([keys[layer] for layer in mine], np.uint64)
                assert np.array_equal(oracle.cache.pools[group][:, page], right), (
                    f"page {page} of group {group} does not hold {self.named[digest]}"
                )

    def check_end(self) -> None:
        """Check that an idle engine holds nothing."""
        assert not self.rig.engine.has_work
        assert not self.tracks
        assert not self.requests
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for pool in self.pages.pools:
            assert pool.num_live == 0
            assert pool.num_free + pool.num_cached == pool.num_pages - 1
        self.check_contents()

    def _note_digests(self) -> None:
        for uid, sequence in list(self.known.items()):
            for j, digest in enumerate(sequence.digests):
                if digest not in self.named:
                    tokens = tuple(sequence.tokens[: (j + 1) * self.size])
                    assert len(tokens) == (j + 1) * self.size
                    self.named[digest] = sequence.root, tokens
            if uid not in self.tracks:
                del self.known[uid]

    def _keys(self, digest: bytes) -> list[list[int]]:
        if digest not in self.contents:
            _, tokens = self.named[digest]
            self.contents[digest] = page_contents(self.rig.config, tokens, self.size)[-1]
        return self.contents[digest]

    def _check_sequence(self, sequence: Sequence) -> None:
        known = len(sequence.tokens)
        assert sequence.in_flight >= 0
        assert sequence.ahead >= 0
        assert known <= sequence.max_len
        if sequence.phase in (Phase.WAITING, Phase.FINISHED):
            assert not any(sequence.pages)
            assert sequence.slot == -1
            return
        assert (sequence.slot >= 0) == (sequence.phase is Phase.DECODE)
        assert len({len(pages) for pages in sequence.pages}) == 1
        assert len(sequence.pages[0]) * self.size >= sequence.computed
        decoding = sequence.phase is Phase.DECODE
        written_next = sequence.prefill_end if decoding else sequence.computed
        for group, window in enumerate(self.pages.windows):
            self._check_table(group, window, sequence.pages[group], written_next)

    def _check_table(
        self, group: int, window: int | None, pages: list[int], written_next: int
    ) -> None:
        """A table names each page once, all that is seen, and for writing only its own."""
        held = [page for page in pages if page]
        assert len(set(held)) == len(held)
        first = 0 if window is None else max(0, written_next - window + 1) // self.size
        assert all(pages[first:]), f"group {group}: a page is missing in {pages} from {first}"
        for page in pages[written_next // self.size :]:
            assert self.pages.pools[group].holders(page) == 1, f"page {page} is not its own"
        if window is not None:
            limits = self.scheduler.limits
            most = window + 2 * limits.span + limits.decode_steps
            assert len(held) <= most // self.size + 3, f"group {group} keeps {held}"

    def _check_gauges(self, live: list[Sequence]) -> None:
        stats = self.rig.engine.stats()
        running = [s for s in live if s.phase in (Phase.PREFILL, Phase.DECODE)]
        assert stats.running == len(running)
        assert stats.waiting == len(live) - len(running)
        slots = [s.slot for s in running if s.slot >= 0]
        assert len(set(slots)) == len(slots)
        assert all(slot < self.scheduler.limits.max_running for slot in slots)
        assert len(running) <= self.scheduler.limits.max_running
        for group, pool in enumerate(self.pages.pools):
            counts = (stats.pages_live, stats.pages_cached, stats.pages_free)
            assert sum(count[group] for count in counts) == pool.num_pages - 1
        totals = stats.totals
        ended = totals.finished + totals.aborted + totals.failed
        # An interrupt may fall between an end and its being counted.
        assert abs(totals.requests - ended - len(self.requests)) <= totals.recoveries

    def _check_pool(self, group: int, live: list[Sequence]) -> None:
        pool = self.pages.pools[group]
        pool.check()
        holders: collections.defaultdict[int, list[tuple[int, Sequence]]]
        holders = collections.defaultdict(list)
        for sequence in live:
            for j, page in enumerate(sequence.pages[group] if sequence.pages else ()):
                if page:
                    holders[page].append((j, sequence))
        assert pool.num_live == len(holders)
        for page, held in holders.items():
            assert pool.holders(page) == len(held), f"page {page} of group {group}"
            if len(held) > 1:
                prefixes = {(j, s.root, tuple(s.tokens[: (j + 1) * self.size])) for j, s in held}
                assert len(prefixes) == 1, f"page {page} is shared by {prefixes}"
