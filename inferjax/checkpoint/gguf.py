"""Reads GGUF files (versions 2 and 3, little-endian); tensors are read as codes or dequantized.

A file's numbers are claims. Every count, length and offset is checked against the bytes that are
left before anything is allocated or looped over: time and memory stay proportional to the file.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

import struct
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxtyping import Shaped, UInt8

from inferjax.checkpoint.gguf_blocks import BLOCKS, UNREAD, BlockType, dequantize, unpack_rows
from inferjax.checkpoint.gguf_parts import GgufPart, check_parts, gguf_in_folder, part_paths
from inferjax.checkpoint.stored_codes import StoredCodes
from inferjax.checkpoint.tensor_file import (
    MappedFile,
    MappedTensors,
    StoredTensor,
    TensorEntry,
    TensorFile,
    check_no_overlap,
    count_elements,
    describe_start,
    map_file,
    quoted,
)
from inferjax.errors import CheckpointError

MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 65535
MAX_ALIGNMENT = 2**20
# What takes far more memory than bytes of the file. Large vocabularies have 650,000 strings.
MAX_PAIRS = MAX_TENSORS = MAX_NESTED = 65_536
MAX_STRINGS, BYTES_PER_STRING = 2**20, 32
# The fewest bytes that a metadata pair and a tensor description can take: what bounds their counts.
MIN_PAIR_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_BY_NAME = {kind.name: kind for kind in BLOCKS.values()}
_U64 = struct.Struct("<Q")


def open_gguf(path: Path) -> TensorFile:
    """Map a GGUF model and check its whole header; tensors are read and dequantized on demand.

    `path` is a file, any one part of a split model, or the folder that holds one model. Metadata
    values are Python scalars and strings, `list[str]`, NumPy arrays of numbers, or lists of such
    arrays. Shapes are row-major: the reverse of the order in the file.

    Raises: CheckpointError naming the file and the field that lies, or the parts that are missing.
    """
    if path.is_dir():
        path = _only_model(path)
    part = _open_part(path)
    if part.count == 1:
        return MappedTensors(path, part.stored, part.metadata, _decode, _decode_codes)
    parts = [part if other == path else _open_part(other) for other in part_paths(part)]
    check_parts(parts)
    stored = [tensor for part in parts for tensor in part.stored]
    return MappedTensors(parts[0].path, stored, parts[0].metadata, _decode, _decode_codes)


def _only_model(folder: Path) -> Path:
    path = gguf_in_folder(folder)
    if path is None:
        raise CheckpointError(f"there is no .gguf file in {folder}", fix="give the file's path")
    return path


def _open_part(path: Path) -> GgufPart:
    cursor = _Cursor(map_file(path), path)
    num_tensors = _read_preamble(cursor)
    num_pairs = cursor.count(MIN_PAIR_BYTES, "number of metadata pairs")
    cursor.spend(num_pairs, "metadata pairs", "the file")
    metadata = _read_metadata(cursor, num_pairs)
    alignment = _alignment(metadata, path)
    table = _read_table(cursor, num_tensors)
    start = -(-cursor.at // alignment) * alignment
    stored = [_locate(cursor, entry, start, offset, alignment) for entry, offset in table]
    check_no_overlap(stored)
    return GgufPart(path, metadata, stored)


def _decode(
    tensor: StoredTensor, raw: UInt8[np.ndarray, " bytes"]
) -> Shaped[np.ndarray, " elements"]:
    return dequantize(_BY_NAME[tensor.entry.dtype], raw)


def _decode_codes(tensor: StoredTensor, raw: UInt8[np.ndarray, " bytes"]) -> StoredCodes:
    return unpack_rows(_BY_NAME[tensor.entry.dtype], raw, tensor.entry.shape[-1])


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, mapped: MappedFile, path: Path) -> None:
        self.mapped, self.path = mapped, path
        self.at, self.size = 0, len(mapped)
        self.left = {
            "metadata pairs": MAX_PAIRS,
            "tensors": MAX_TENSORS,
            "nested arrays": MAX_NESTED,
            "strings": max(MAX_STRINGS, self.size // BYTES_PER_STRING),
        }

    def fail(self, what: str, *, why: str = "", fix: str = "") -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}", why=why, fix=fix)

    def need(self, num_bytes: int, what: str) -> None:
        """Raise unless `num_bytes` more bytes follow."""
        if num_bytes > self.size - self.at:
            self.fail(
                f"{what} does not fit the file",
                why=f"it takes at least {num_bytes} bytes at byte {self.at}, "
                f"but the file ends at byte {self.size}",
                fix="the file is cut off or damaged: fetch it again",
            )

    def scalar(self, dtype: np.dtype, what: str) -> int | float | bool:
        return self.array(dtype, 1, what)[0].item()

    def array(self, dtype: np.dtype, count: int, what: str) -> Shaped[np.ndarray, " count"]:
        """Copy `count` numbers out of the file."""
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.mapped, dtype, count, self.at).copy()
        self.at += values.nbytes
        if dtype == np.bool and values.view(np.uint8).max(initial=0) > 1:
            self.fail(f"{what} holds a bool that is neither 0 nor 1")
        return values

    def unsigned(self, num_bytes: int, what: str) -> int:
        self.need(num_bytes, what)
        self.at += num_bytes
        return int.from_bytes(self.mapped[self.at - num_bytes : self.at], "little")

    def u32(self, what: str) -> int:
        return self.unsigned(4, what)

    def u64(self, what: str) -> int:
        return self.unsigned(8, what)

    def count(self, min_bytes: int, what: str) -> int:
        """Read the count of things that take `min_bytes` each or more, all of which must fit."""
        count = self.u64(what)
        self.need(count * min_bytes, f"{what} {count}")
        return count

    def spend(self, count: int, kind: str, what: str) -> int:
        """Count things of which a file may hold so many, and return the count."""
        if count > self.left[kind]:
            self.fail(
                f"{what} has {count} {kind}", why=f"at most {self.left[kind]} more are expected"
            )
        self.left[kind] -= count
        return count

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings: a plain loop over locals, as vocabularies have 262,144 of them."""
        mapped, at, size = self.mapped, self.at, self.size
        found: list[str] = []
        for index in range(count):
            start = at + 8
            at = start + _U64.unpack_from(mapped, at)[0] if start <= size else size + 1
            if at > size:
                self.at = start - 8
                self.need(at - self.at, f"string {index} of {what}")
            try:
                found.append(str(mapped[start:at], "utf-8"))
            except UnicodeDecodeError as error:
                self.fail(f"string {index} of {what} is not UTF-8", why=str(error)[:200])
        self.at = at
        return found

    def string(self, what: str, max_bytes: int | None = None) -> str:
        """Read one string; a `max_bytes` marks a name, which may not be empty."""
        start = self.at
        [text] = self.strings(1, what)
        num_bytes = self.at - start - 8
        if max_bytes is not None and not 0 < num_bytes <= max_bytes:
            self.fail(f"{what} has {num_bytes} bytes", why=f"1 to {max_bytes} are allowed")
        return text


def _read_preamble(cursor: _Cursor) -> int:
    """Check magic and version; return the number of tensors."""
    start = cursor.mapped[:32]
    if not start.startswith(b"GGUF"):
        cursor.fail(
            f"is not a GGUF file: it begins with {start[:4]!r}, not b'GGUF'",
            why=describe_start(start),
        )
    cursor.at = 4
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        cursor.fail(
            "is a big-endian GGUF file, which is not supported",
            fix="convert it with gguf_convert_endian.py from the gguf package",
        )
    if version not in (2, 3):
        cursor.fail(f"is GGUF version {version}", why="versions 2 and 3 are supported")
    num_tensors = cursor.count(MIN_TENSOR_BYTES, "number of tensors")
    return cursor.spend(num_tensors, "tensors", "the file")


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_pairs):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"metadata key {quoted(key)} appears twice")
        metadata[key] = _read_value(cursor, f"metadata {quoted(key)}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> object:
    kind = cursor.u32(f"type of {what}")
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what, depth=1)
    if kind not in _SCALARS:
        cursor.fail(f"{what} has the unknown value type {kind}", why="types 0 to 12 are defined")
    return cursor.scalar(_SCALARS[kind], what)


def _read_array(cursor: _Cursor, what: str, depth: int) -> object:
    if depth > MAX_ARRAY_DEPTH:
        cursor.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    kind = cursor.u32(f"element type of {what}")
    if kind == _STRING:
        count = cursor.spend(cursor.count(8, f"length of {what}:"), "strings", what)
        return cursor.strings(count, what)
    if kind == _ARRAY:
        count = cursor.spend(cursor.count(12, f"length of {what}:"), "nested arrays", what)
        return [_read_array(cursor, what, depth + 1) for _ in range(count)]
    if kind not in _SCALARS:
        cursor.fail(f"{what} has the unknown element type {kind}", why="types 0 to 12 are defined")
    count = cursor.count(_SCALARS[kind].itemsize, f"length of {what}:")
    return cursor.array(_SCALARS[kind], count, what)


def _alignment(metadata: dict[str, object], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise CheckpointError(
            f"{path}: general.alignment is {quoted(str(alignment))}",
            why=f"it must be a power of two up to {MAX_ALIGNMENT}",
        )
    return alignment


def _read_table(cursor: _Cursor, num_tensors: int) -> list[tuple[TensorEntry, int]]:
    """Read every tensor's description and its offset into the data section."""
    table: dict[str, tuple[TensorEntry, int]] = {}
    for index in range(num_tensors):
        name = cursor.string(f"name of tensor {index}", MAX_KEY_BYTES)
        what = f"tensor {quoted(name)}"
        if name in table:
            cursor.fail(f"{what} appears twice")
        num_dims = cursor.u32(f"number of dimensions of {what}")
        if not 1 <= num_dims <= 4:
            cursor.fail(f"{what} has {num_dims} dimensions", why="1 to 4 are allowed")
        dims = [cursor.u64(f"shape of {what}") for _ in range(num_dims)]
        kind = _block_type(cursor, cursor.u32(f"type of {what}"), what)
        offset = cursor.u64(f"offset of {what}")
        entry = TensorEntry(name, kind.name, tuple(dims[::-1]), codes=kind.layout)
        table[name] = (entry, offset)
    return list(table.values())


def _block_type(cursor: _Cursor, number: int, what: str) -> BlockType:
    if number not in BLOCKS:
        name = f"{UNREAD[number]} ({number})" if number in UNREAD else f"{number}"
        cursor.fail(
            f"{what} has GGUF tensor type {name}, which cannot be read",
            why=f"types that can: {', '.join(kind.name for kind in BLOCKS.values())}",
            fix="quantize the model to one of these, such as Q4_K_M or Q8_0",
        )
    return BLOCKS[number]


def _locate(
    cursor: _Cursor, entry: TensorEntry, start: int, offset: int, alignment: int
) -> StoredTensor:
    """Check that a tensor lies inside the data section, which begins at `start`."""
    what, kind = f"tensor {quoted(entry.name)}", _BY_NAME[entry.dtype]
    num_elements = count_elements(entry.shape)
    if not num_elements:
        cursor.fail(f"{what} has the impossible shape {entry.shape}")
    if entry.shape[-1] % kind.block_len:
        cursor.fail(
            f"{what} has rows of {entry.shape[-1]} elements",
            why=f"type {kind.name} stores blocks of {kind.block_len}, and a row is whole blocks",
        )
    if offset % alignment:
        cursor.fail(
            f"{what} begins at offset {offset}", why=f"offsets are multiples of {alignment}"
        )
    num_bytes = num_elements // kind.block_len * kind.block_bytes
    if start + offset + num_bytes > cursor.size:
        cursor.fail(
            f"{what} does not fit the file",
            why=f"shape {entry.shape} as {kind.name} takes {num_bytes} bytes "
            f"at byte {start + offset}, but the file ends at byte {cursor.size}",
            fix="the file is cut off or damaged: fetch it again",
        )
    return StoredTensor(entry, cursor.mapped, cursor.path, start + offset, num_bytes)
