"""Reads a JSON object or list from a file that nobody vouches for."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from inferjax.errors import CheckpointError

MAX_BYTES = 16 * 2**20  # labels of classification heads can take megabytes


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
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes", why=f"at most {max_bytes} are read")
        return json.loads(
            path.read_bytes(),
            object_pairs_hook=partial(_without_repeats, path),
            parse_constant=partial(_refuse_constant, path),
        )
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deep") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)[:200]) from error


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
