"""Reads safetensors checkpoints: one file, or the shards that a model.safetensors.index.json lists.

The header is checked here, against the file's size and the format's rules, before any of its
numbers is used. Reading is then a view of the mapped file: no bytes are copied.

Source: the format description in the safetensors repository's README.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from inferjax.checkpoint.json_file import check_density
from inferjax.checkpoint.tensor_file import (
    PICKLE_SUFFIXES,
    MappedTensors,
    StoredTensor,
    TensorEntry,
    TensorFile,
    check_no_overlap,
    count_elements,
    describe_start,
    map_file,
    quoted,
    refuse_pickle,
)
from inferjax.errors import CheckpointError

# The largest header or index that is parsed: 300,000 tensors, three times the largest models.
MAX_JSON_BYTES = 32 * 2**20
# Whatever the tensors' size, this much is parsed.
MIN_JSON_BYTES = 4 * 2**20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Name in the file -> (our name, bits per element). Only `_READ` are read.
_DTYPES = {
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F4": ("float4_e2m1fn", 4),
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
}
_WEIGHTS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Words of packed codes are read too, but are no weights.
_READ = _WEIGHTS | {"int32": np.dtype(np.int32)}
_SHARD_NAME = re.compile(r"[\w+=. -]{1,200}\.safetensors", re.ASCII)


def open_safetensors(path: Path) -> TensorFile:
    """Map a .safetensors file, or a folder with model.safetensors or an index and its shards.

    Metadata is the header's `__metadata__`, or the index's "metadata" for shards. A folder that
    holds only pickles is refused.

    Raises: CheckpointError naming the file and the tensor or field that lies.
    """
    try:
        path = _find(path) if path.is_dir() else path
    except OSError as error:
        _fail(path, "cannot be read", str(error))
    if path.suffix in PICKLE_SUFFIXES:
        refuse_pickle(path, "it")
    return _open_sharded(path) if path.name == INDEX_NAME else _open_single(path)


def _find(folder: Path) -> Path:
    """Return the file or index to open, or say what the folder holds instead."""
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).exists():
            return folder / name
    names = sorted(child.name for child in folder.iterdir() if child.is_file())
    shards = [name for name in names if name.endswith(".safetensors")]
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{folder} is an adapter, not a model",
            why="it holds changes to the weights of another model, which its "
            "adapter_config.json names",
            fix="merge it into that model, and load the folder that this writes",
        )
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles and not shards:
        refuse_pickle(folder, ", ".join(pickles[:4]))
    raise CheckpointError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}",
        why=f"it holds {', '.join(quoted(name) for name in names[:8]) or 'no files'}",
        fix="fetch the index, or name one .safetensors file" if shards else "name another folder",
    )


def _open_single(path: Path) -> TensorFile:
    stored, metadata = _read_header(path)
    return MappedTensors(path, stored, metadata, _decode)


def _open_sharded(index_path: Path) -> TensorFile:
    """Open every shard and check that the index and the shards' headers tell the same."""
    weight_map, metadata = _read_index(index_path)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = index_path.parent / shard
        if not path.exists():
            raise CheckpointError(
                f"shard {shard} is missing from {index_path.parent}",
                why=f"{index_path.name} says it holds "
                f"{sum(name == shard for name in weight_map.values())} tensors",
                fix="fetch the missing file",
            )
        for tensor in _read_header(path)[0]:
            twin = stored.setdefault(tensor.entry.name, tensor)
            if twin is not tensor:
                raise CheckpointError(
                    f"tensor {quoted(tensor.entry.name)} is in two shards",
                    why=f"both {twin.path.name} and {shard} hold it",
                )
    _check_index(index_path, weight_map, stored)
    return MappedTensors(index_path.parent, stored.values(), metadata, _decode)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, object]]:
    """Return the map from tensor to shard, whose names are plain files of the index's folder."""
    mapped = map_file(path)
    shards = path.parent.glob("*.safetensors")
    _check_json_size(path, "text", len(mapped), sum(shard.stat().st_size for shard in shards))
    index = _parse_object(path, mapped[:])
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(path, "has no weight_map", "an index maps every tensor to its shard")
    if not isinstance(metadata, dict):
        _fail(path, "has metadata that is not an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            _fail(
                path,
                f"maps tensor {quoted(name)} to {_shown(shard)}",
                "a shard is named by a plain .safetensors file name in the index's own folder",
            )
    return weight_map, metadata


def _check_index(path: Path, weight_map: dict[str, str], stored: dict[str, StoredTensor]) -> None:
    """Raise unless every tensor is in the shard that the index names, listing the absent."""
    absent = [
        f"{quoted(name)} in {shard}"
        for name, shard in weight_map.items()
        if name not in stored or stored[name].path.name != shard
    ]
    if absent:
        raise CheckpointError(
            f"{path}: {len(absent)} tensors are absent from the shards said to hold them",
            why=", ".join(absent[:8]) + (", ..." if len(absent) > 8 else ""),
            fix="index and shards come from different versions: fetch them together",
        )


def _read_header(path: Path) -> tuple[list[StoredTensor], dict[str, object]]:
    """Return the checked tensors of one file and its `__metadata__`."""
    mapped = map_file(path)
    length = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or length > len(mapped) - 8 or mapped[8:9] != b"{":
        _fail(
            path,
            f"has no safetensors header: {len(mapped)} bytes, of which the header claims {length}",
            describe_start(mapped[:32]) or "the file is cut off, damaged or of another format",
        )
    _check_json_size(path, "header", length, len(mapped))
    header = _parse_object(path, mapped[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(path, "has a __metadata__ that does not map strings to strings")
    stored = []
    for name, fields in header.items():
        entry, begin, end = _check_entry(path, name, fields, len(mapped) - 8 - length)
        stored.append(StoredTensor(entry, mapped, path, 8 + length + begin, end - begin))
    check_no_overlap(stored)
    _check_no_gap(path, stored, 8 + length, len(mapped))
    return stored, metadata


def _check_json_size(path: Path, what: str, num_bytes: int, whole: int) -> None:
    """Refuse JSON that is large beside the tensors: in memory it takes 15 times its size."""
    most = min(MAX_JSON_BYTES, max(MIN_JSON_BYTES, whole // 8))
    if num_bytes > most:
        _fail(path, f"has a {what} of {num_bytes} bytes", f"at most {most} are read")


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse JSON strictly: UTF-8, no repeated key, no NaN, no runaway nesting or number."""
    check_density(path, text)
    try:
        parsed = json.loads(
            text.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        _fail(path, "does not hold the JSON it should", str(error)[:200])
    if not isinstance(parsed, dict):
        _fail(path, "does not hold a JSON object")
    return parsed


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{quoted(twice)} appears twice in one object")
    return fields


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_entry(
    path: Path, name: str, fields: object, data_bytes: int
) -> tuple[TensorEntry, int, int]:
    """Return a tensor's entry, and where its bytes begin and end in the data section."""
    what = f"declares tensor {quoted(name)} with"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{what} other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _fail(path, f"{what} the unknown dtype {_shown(dtype)}", f"known: {', '.join(_DTYPES)}")
    if not _are_counts(shape) or (elements := count_elements(tuple(shape))) is None:
        _fail(path, f"{what} the impossible shape {_shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        _fail(
            path,
            f"{what} the data_offsets {_shown(offsets)}",
            f"they must be a begin and an end within the file's {data_bytes} data bytes",
        )
    begin, end = offsets
    our_name, bits = _DTYPES[dtype]
    if elements * bits != (end - begin) * 8:
        _fail(
            path,
            f"{what} shape {tuple(shape)} and dtype {dtype}: {elements * bits / 8:g} bytes",
            f"its data_offsets [{begin}, {end}] hold {end - begin} bytes",
        )
    return TensorEntry(name, our_name, tuple(shape), our_name in _WEIGHTS), begin, end


def _are_counts(values: object) -> bool:
    """Tell whether `values` is a list of non-negative integers; JSON's true and false are not."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _shown(value: object) -> str:
    """Show a JSON value in an error, whatever its size and nesting."""
    if isinstance(value, list) and len(value) <= 32 and all(type(v) is int for v in value):
        return quoted(str(value))
    return quoted(value) if isinstance(value, str) else f"a {type(value).__name__}"


def _check_no_gap(path: Path, stored: Iterable[StoredTensor], start: int, size: int) -> None:
    """Raise if a byte of the data section belongs to no tensor: nothing may hide there."""
    covered = start
    for tensor in sorted(stored, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != covered:
            break
        covered += tensor.num_bytes
    if covered != size:
        _fail(
            path,
            f"has bytes that belong to no tensor, from byte {covered} of {size}",
            "tensors must fill the data section without gaps",
            fix="the file is damaged or has something appended: fetch it again",
        )


def _decode(
    tensor: StoredTensor, raw: UInt8[np.ndarray, " bytes"]
) -> Shaped[np.ndarray, " elements"]:
    dtype = tensor.entry.dtype
    if dtype not in _READ:
        _fail(
            tensor.path,
            f"holds tensor {quoted(tensor.entry.name)} as {dtype}, which is not read as a weight",
            f"weights are {', '.join(_WEIGHTS)}",
            fix="convert the checkpoint to one of these",
        )
    return raw.view(_READ[dtype])


def _fail(path: Path, what: str, why: str = "", fix: str = "") -> NoReturn:
    raise CheckpointError(f"{path} {what}", why=why, fix=fix)
