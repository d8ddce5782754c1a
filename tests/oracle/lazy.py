"""A queue of device work that runs as late as it may: a host array used twice is noticed."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Violation(AssertionError):
    """The engine asked for something that a device would do silently and wrongly."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket[T]:
    """A handle: reading it runs everything up to its work, and raises its `fault`, if any."""

    queue: "Queue"
    run: Callable[[], T]
    used: Sequence[np.ndarray]
    kept: Sequence[np.ndarray]
    fault: BaseException | None
    result: T | None = None
    finished: bool = False

    def read(self) -> Any:
        """Return the result."""
        while not self.finished:
            self.queue.step()
        if self.fault is not None:
            raise self.fault
        return self.result


class Queue:
    """At most `depth` operations wait; a further one makes the oldest run.

    `violations` keeps what was found, for an engine may survive an exception.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.waiting: deque[Ticket[Any]] = deque()
        self.violations: list[Violation] = []

    def add[T](
        self,
        run: Callable[[], T],
        arrays: Sequence[np.ndarray],
        fault: BaseException | None = None,
    ) -> Ticket[T]:
        """Enqueue work over host arrays that must not change before it has run."""
        ticket = Ticket(self, run, arrays, [array.copy() for array in arrays], fault)
        self.waiting.append(ticket)
        while len(self.waiting) > self.depth:
            self.step()
        return ticket

    def step(self) -> None:
        """Run the oldest operation."""
        try:
            if not self.waiting:
                raise Violation("a handle of dropped work was read")
            ticket = self.waiting.popleft()
            for used, kept in zip(ticket.used, ticket.kept, strict=True):
                if not np.array_equal(used, kept):
                    raise Violation(f"a host array changed in flight:\n{kept}\n->\n{used}")
            ticket.result = ticket.run()
            ticket.finished = True
        except Violation as violation:
            self.violations.append(violation)
            raise

    def flush(self) -> None:
        """Run everything."""
        while self.waiting:
            self.step()

    def drop(self) -> None:
        """Forget everything."""
        self.waiting.clear()
