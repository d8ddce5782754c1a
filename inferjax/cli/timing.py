"""How long compilation took, so that speed can be shown without it."""

import time

import jax

COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Listen to jax and remember when it traced or compiled.

    Intervals are (start, end) of `time.perf_counter`, because traces nest: a sum would count inner
    functions twice.
    """

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def seconds(self, start: float, end: float) -> float:
        """Return how much of the time between two moments went into compilation."""
        total, reached = 0.0, start
        for low, high in sorted(self.intervals):
            low, high = max(low, reached), min(high, end)
            total += max(0.0, high - low)
            reached = max(reached, high)
        return total

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event in COMPILE_EVENTS:
            now = time.perf_counter()
            self.intervals.append((now - duration_secs, now))
