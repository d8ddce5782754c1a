"""Counting what XLA compiles."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collect the event of every program compiled inside the block."""
    seen: list[str] = []

    def listen(event: str, duration: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(f"{event} {about}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
