"""Compilations counted, and after the warm-up explained: which argument was not like before."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from inferjax.errors import UnexpectedCompilation

COMPILED = "/jax/core/compile/backend_compile_duration"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class CompileWatch:
    """Calls programs and notices when one is compiled.

    count and seconds are of all compilations so far, `surprises` counts those after `sealed` was
    set. Calls while `learning`, that is during the warm-up, are what surprises are compared with;
    an engine without a warm-up need not look at the arguments of every call. jax reports
    compilations per process; those of other threads are not ours.
    """

    strict: bool = False
    learning: bool = False
    sealed: bool = False
    count: int = 0
    seconds: float = 0.0
    surprises: int = 0
    _known: dict[str, list[dict[str, str]]] = dataclasses.field(default_factory=dict)
    _calling: int | None = None
    _compiled: int = 0

    def start(self) -> None:
        """Listen to jax."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def call[T](self, name: str, program: Callable[..., T], *args: Any, **static: Any) -> T:
        """Run `program`; a compilation is counted, and after the warm-up reported.

        Raises: UnexpectedCompilation after the warm-up, if strict. The program has been run then,
        and what it was given is gone.
        """
        self._calling, self._compiled = threading.get_ident(), 0
        began = time.perf_counter()
        try:
            result = program(*args, **static)
        finally:
            self._calling = None
        if self._compiled:
            self.count += 1
            self.seconds += time.perf_counter() - began
        if self.learning or (self.sealed and self._compiled):
            # An array that was donated still knows its shape.
            shapes = _describe(args)
            known = self._known.setdefault(name, [])
            if not self.learning:
                self._report(name, shapes, known)
            known.append(shapes)
        return result

    def _report(self, name: str, shapes: dict[str, str], known: list[dict[str, str]]) -> None:
        self.surprises += 1
        changes = _difference(shapes, known)
        _logger.warning("%s was compiled after the warm-up: %s", name, changes)
        if self.strict:
            raise UnexpectedCompilation(
                f"{name} was compiled after the warm-up",
                why=changes,
                fix="every shape must come from the bucket plan; this is a bug of the engine",
            )

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == COMPILED and threading.get_ident() == self._calling:
            self._compiled += 1


def _describe(args: Any) -> dict[str, str]:
    """Return the kind of every leaf, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    return {jax.tree_util.keystr(path): _kind(leaf) for path, leaf in leaves}


def _kind(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def _difference(shapes: dict[str, str], known: list[dict[str, str]]) -> str:
    """Name what differs from the known call that is most alike."""
    if not known:
        return "it was never called before"

    def changes(other: dict[str, str]) -> list[str]:
        paths = sorted(shapes.keys() | other.keys())
        return [
            f"{path}: {other.get(path, 'absent')} -> {shapes.get(path, 'absent')}"
            for path in paths
            if shapes.get(path) != other.get(path)
        ]

    fewest = min((changes(other) for other in known), key=len)
    return "; ".join(fewest[:5]) or "the arguments look alike: their placement or a setting changed"
