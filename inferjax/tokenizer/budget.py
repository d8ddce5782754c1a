"""What one rendering of a template may spend: steps, seconds, and bytes of values it makes."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from inferjax.errors import TemplateError

MAX_STEPS = 500_000
MAX_LENGTH = 16_000_000
MAX_BYTES = 256 * 2**20
MAX_SECONDS = 5.0
MAX_DEPTH = 64
# What an item of a list takes: its place, and a small object.
ITEM_BYTES = 64


@dataclasses.dataclass(slots=True)
class Budget:
    """What one rendering may still spend.

    Every method that refuses raises TemplateError.
    """

    steps: int = MAX_STEPS
    bytes: int = MAX_BYTES
    deadline_s: float = 0.0

    def start(self, seconds: float) -> None:
        """Refill for one rendering of at most `seconds`."""
        self.steps, self.bytes = MAX_STEPS, MAX_BYTES
        self.deadline_s = time.monotonic() + seconds

    def spend(self, steps: int = 1) -> None:
        """Count steps; refuse more when they or the time are used up."""
        self.steps -= steps
        if self.steps < 0:
            self.refuse(f"more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.deadline_s:
            self.refuse("time is up")

    def allow(self, length: int) -> None:
        """Admit a value of `length` characters or items before it is made."""
        if length > MAX_LENGTH:
            # A number of a million digits cannot be written out.
            size = f"{length:,}" if length < 10**30 else "far too many"
            self.refuse(f"a value of {size} characters or items")

    def use(self, num_bytes: int) -> None:
        """Count bytes that are made, kept or looked through."""
        self.bytes -= num_bytes
        if self.bytes < 0:
            self.refuse(f"more than {MAX_BYTES // 2**20} MiB of values")

    def make[T](self, value: T) -> T:
        """Count a new value, not what it refers to, and return it."""
        if isinstance(value, str):
            self.use(len(value) if value.isascii() else 4 * len(value))
        elif isinstance(value, list | tuple | dict):
            self.use(ITEM_BYTES * len(value))
        return value

    def weigh(self, value: Any) -> tuple[int, int]:
        """Count a value and all it holds; return about how long its text is, and how deep it is.

        Lists nested by doubling are compared, hashed or printed at endless length, and those that
        are nested a million deep use up the stack.
        """
        pending, length, deepest = [(value, 1)], 0, 1
        while pending:
            item, depth = pending.pop()
            self.spend()
            length += len(item) if isinstance(item, str) else 32
            if isinstance(item, str):
                self.allow(len(item))
                self.use(len(item) // 8)
            elif isinstance(item, list | tuple | dict):
                deepest = max(deepest, depth)
                if depth > MAX_DEPTH:
                    self.refuse(f"lists nested more than {MAX_DEPTH} deep")
                parts = [*item.keys(), *item.values()] if isinstance(item, dict) else item
                pending += ((part, depth + 1) for part in parts)
        return length, deepest

    def collect(self, items: Iterable[Any]) -> list[Any]:
        """Return what an iterator yields: iterators within iterators would use up the stack."""
        found = []
        for item in items:
            self.spend()
            found.append(item)
        return found

    def refuse(self, why: str) -> NoReturn:
        """Raise the error of a budget that is used up."""
        raise TemplateError(
            "the chat template does too much work", why=why, fix="shorten the messages"
        )
