"""A GGUF model split over several files: which files belong together, and whether they do.

Part n of m is named `prefix-0000n-of-0000m.gguf` and says `split.no` n - 1, `split.count` m and, in
`split.tensors.count`, how many tensors the whole model has. The first part carries the metadata.
What a part holds is read elsewhere; here only names and numbers are compared.

Source: llama.cpp's gguf-split.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from inferjax.checkpoint.tensor_file import StoredTensor, quoted
from inferjax.errors import CheckpointError

MAX_PARTS = 65535  # split.count has 16 bits
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
# Every part has its own value of these.
_OF_ONE_PART = frozenset({"split.no", "general.alignment"})


@dataclasses.dataclass(frozen=True, slots=True)
class GgufPart:
    """The checked header of one file."""

    path: Path
    metadata: Mapping[str, object]
    stored: Sequence[StoredTensor]

    @property
    def count(self) -> int:
        """The number of files that the model is split into."""
        return max(1, _number(self, "split.count", default=1, limit=MAX_PARTS))


def models_among(names: Iterable[str]) -> list[list[str]]:
    """Return the names of the files of each model, its parts in order."""
    models: dict[object, list[str]] = {}
    for text in sorted(names):
        name = _PART_NAME.fullmatch(text)
        models.setdefault((name["prefix"], name["count"]) if name else text, []).append(text)
    return list(models.values())


def gguf_in_folder(folder: Path) -> Path | None:
    """Return the one GGUF model of a folder, the first part that is there; None if there is none.

    Raises: CheckpointError if the folder holds files of several models.
    """
    models = models_among(path.name for path in folder.glob("*.gguf"))
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models",
            why=f"among them {', '.join(quoted(parts[0]) for parts in models[:5])}",
            fix="give the path of one of the files",
        )
    return folder / models[0][0] if models else None


def part_paths(part: GgufPart) -> list[Path]:
    """Return the paths of all parts of the model that `part` belongs to, in order.

    Raises: CheckpointError for a name that does not fit what the file says, and for missing parts.
    """
    number, count = _number(part, "split.no", default=0, limit=MAX_PARTS - 1) + 1, part.count
    name = _PART_NAME.fullmatch(part.path.name)
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        raise CheckpointError(
            f"{part.path} is part {number} of {count} of a split model, and its name is another's",
            why="the other parts are found by its name",
            fix=f"rename it to end in -{number:05}-of-{count:05}.gguf, as all parts are named",
        )
    paths = [
        part.path.with_name(f"{name['prefix']}-{n:05}-of-{count:05}.gguf")
        for n in range(1, count + 1)
    ]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            f"{part.path} is one of {count} parts, and {len(missing)} of them are missing",
            why=f"there is no {', '.join(map(quoted, missing[:5]))} in {part.path.parent}",
            fix="put all parts of the model in one folder",
        )
    return paths


def check_parts(parts: Sequence[GgufPart]) -> None:
    """Raise unless the parts, in order, are those of one model."""
    first = parts[0]
    for index, part in enumerate(parts):
        if part.count != len(parts):
            _refuse_mixed(
                part, f"it says it is one of {part.count} parts, {first.path} {first.count}"
            )
        if (number := _number(part, "split.no", default=0, limit=MAX_PARTS - 1)) != index:
            _refuse_mixed(part, f"it says it is part {number + 1}, its name part {index + 1}")
        for key, value in part.metadata.items():
            if key not in _OF_ONE_PART and _differs(first.metadata.get(key, value), value):
                _refuse_mixed(part, f"its {quoted(key)} is not that of {first.path}")
    names = Counter(tensor.entry.name for part in parts for tensor in part.stored)
    twice = [name for name, times in names.most_common(5) if times > 1]
    if twice:
        raise CheckpointError(
            f"{first.path}: tensors appear in two parts: {', '.join(map(quoted, twice))}",
            why="parts of different models, or of different splits of one, were mixed",
            fix="fetch all parts again",
        )
    declared = _number(first, "split.tensors.count", default=len(names), limit=2**31 - 1)
    if declared != len(names):
        raise CheckpointError(
            f"{first.path}: its {len(parts)} parts hold {len(names)} tensors, not {declared}",
            why="split.tensors.count says how many there are: a part is another model's or damaged",
            fix="fetch all parts again",
        )


def _number(part: GgufPart, key: str, *, default: int, limit: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= limit:
        raise CheckpointError(
            f"{part.path}: {key} is {quoted(str(value))}",
            why=f"it must be a whole number from 0 to {limit}",
            fix="the file is damaged: fetch it again",
        )
    return value


def _differs(first: object, other: object) -> bool:
    """Compare scalars and strings: long lists stand in the first part only."""
    plain = (bool, int, float, str)
    return isinstance(first, plain) and isinstance(other, plain) and first != other


def _refuse_mixed(part: GgufPart, why: str) -> None:
    raise CheckpointError(
        f"{part.path} does not belong to the parts beside it",
        why=why,
        fix="put the parts of one model, and no others, under its name",
    )
