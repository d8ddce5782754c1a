"""Reads a JSON object or list from a file that nobody vouches for."""

import json
import stat
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from inferjax.errors import CheckpointError

MAX_BYTES = 4 * 2**20  # labels of classification heads can take a megabyte


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in `path`.

    Raises: CheckpointError if it is oversized, too deep, has a key twice, or is no JSON object.
    """
    raw = _read(path, max_bytes)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return raw


def read_list(path: Path, max_bytes: int = MAX_BYTES) -> list[Any]:
    """Return the list in `path`.

    Raises: CheckpointError as `read_object`.
    """
    raw = _read(path, max_bytes)
    if not isinstance(raw, list):
        raise CheckpointError(f"{path} holds no JSON list")
    return raw


def _read(path: Path, max_bytes: int) -> Any:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise CheckpointError(
                f"{path} has {status.st_size} bytes", why=f"at most {max_bytes} are read"
            )
        text = path.read_bytes()
        check_density(path, text)
        return json.loads(
            text,
            object_pairs_hook=partial(_without_repeats, path),
            parse_constant=partial(_refuse_constant, path),
        )
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deep") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)[:200]) from error


def check_density(path: Path, text: bytes) -> None:
    """Refuse JSON that is mostly brackets, before it is parsed.

    A list costs 64 bytes of memory for 3 bytes of text, so that 32 MiB of "[],[]," would take 1 GB.
    Descriptions of tensors need 3 brackets per 50 bytes.

    Raises: CheckpointError.
    """
    num_brackets = text.count(b"[") + text.count(b"{")
    if num_brackets > 1024 + len(text) // 8:
        raise CheckpointError(
            f"{path} cannot be read",
            why=f"{num_brackets} lists and objects in {len(text)} bytes of JSON describe no model",
        )


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated key: which of its values the model was trained with is unclear."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise CheckpointError(
            f"{path} has {twice[:80]!r} twice", fix="remove the one that does not hold", key=twice
        )
    return fields


def _refuse_constant(path: Path, name: str) -> NoReturn:
    raise CheckpointError(f"{path} cannot be read", why=f"{name} is no JSON number")
