"""Files of a batch: lines in, one result line each out, in whatever order they end.

A result names its line by index and digest, so a run that was broken off goes on where it stopped.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from inferjax.errors import InvalidInput

BEGINNING = b'{"index": '


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of the input as it stands there; `index` counts from 0, empty lines too."""

    index: int
    content: bytes

    @property
    def digest(self) -> str:
        """What tells this line from another one at the same place."""
        return hashlib.sha256(self.content.strip()).hexdigest()[:16]


def read_lines(file: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines that are not empty; only one is in memory at a time."""
    for index, content in enumerate(file):
        if content.strip():
            yield Line(index, content)


class Results:
    """The output file: what is in it already, and a place for more.

    Every result is handed to the system at once and whole; a last line that was torn all the same
    is cut off. `settings` is a digest of everything but the line that decides a result.

    Raises: InvalidInput for a file that other settings, or another program, has written.
    """

    def __init__(self, path: Path, settings: str, *, overwrite: bool = False) -> None:
        self._path, self._settings = path, settings
        self._done: dict[int, str] = {}
        self._failed: set[int] = set()
        try:
            self._file = path.open("w+b" if overwrite else "a+b")
        except OSError as error:
            raise InvalidInput(
                f"{path} cannot be written", why=str(error), fix="choose another place"
            ) from error
        try:
            self._take_over()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self._file.close()

    def __contains__(self, line: Line) -> bool:
        return self._done.get(line.index) == line.digest

    @property
    def num_failed(self) -> int:
        """Lines whose result is an error."""
        return len(self._failed)

    def write(self, line: Line, result: dict[str, Any]) -> None:
        """Append the result of a line."""
        names = {"index": line.index, "digest": line.digest, "settings": self._settings}
        text = json.dumps({**names, **result}, ensure_ascii=False)
        # Half a surrogate pair in a user's id is no Unicode, but JSON can spell it.
        self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        self._note(line.index, line.digest, failed="error" in result)

    def _take_over(self) -> None:
        """Note what the file holds, and cut off a torn end."""
        num_whole = 0
        with self._path.open("rb") as file:
            for number, content in enumerate(file, 1):
                result = _parsed(content)
                if result is None:
                    if file.peek(1) or not _is_torn(content):
                        raise _foreign(f"line {number} of {self._path} is no result of a batch")
                    self._file.truncate(num_whole)
                    return
                if result["settings"] != self._settings:
                    raise _foreign(f"{self._path} was made with another model or other settings")
                self._note(result["index"], result["digest"], failed="error" in result)
                num_whole += len(content)

    def _note(self, index: int, digest: str, *, failed: bool) -> None:
        self._done[index] = digest
        (self._failed.add if failed else self._failed.discard)(index)


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Return a line of results, None if it is torn or something else."""
    if not content.endswith(b"\n"):
        return None
    try:
        result = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kinds = {"index": int, "digest": str, "settings": str}
    ours = isinstance(result, dict) and all(isinstance(result.get(n), k) for n, k in kinds.items())
    return result if ours else None


def _is_torn(content: bytes) -> bool:
    """Return whether this could be the beginning of a result; anything else is not ours to cut."""
    return content[: len(BEGINNING)] == BEGINNING[: len(content)]


def _foreign(what: str) -> InvalidInput:
    return InvalidInput(
        what,
        why="results that do not belong together would get mixed",
        fix="choose another output file, or start anew with --overwrite",
    )
