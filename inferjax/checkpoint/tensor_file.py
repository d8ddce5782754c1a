"""What a checkpoint file is to the loader: named tensors, read one at a time, whole or in parts.

Formats parse and check their headers in a memory map, then hand over where each tensor lies.
Weights are read through the file's descriptor: pages of a map would count as the process's memory
for as long as the map exists, and a file that is cut off meanwhile would end the process.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped, UInt8

from inferjax.checkpoint.stored_codes import CodeLayout, StoredCodes
from inferjax.errors import CheckpointError

# Elements that are read, converted and checked at a time: they stay in the processor's cache.
PIECE_ELEMENTS = 2**18
# The same for codes, which become values, codes again and words on the way into a packed weight.
CODE_ELEMENTS = 2**16
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as its file declares it.

    `dtype` is NumPy's name ("float32", "bfloat16") or a quantized GGUF type ("q4_k"); `shape` is
    row-major. Only dtypes of weights are `readable`. `codes` says what `TensorFile.codes` gives;
    None for a tensor that is not stored as codes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    readable: bool = True
    codes: CodeLayout | None = None


@runtime_checkable
class TensorFile(Protocol):
    """An open checkpoint, of one file or several."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by name, in file order."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the file says beside its tensors."""
        ...

    @property
    def paths(self) -> Sequence[Path]:
        """The files that hold the tensors."""
        ...

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return one tensor, read-only: in its stored dtype, or in float32 if it is quantized.

        Raises: CheckpointError for an unknown name, a dtype that is no weight's, or a closed file.
        """
        ...

    def pieces(
        self, name: str, begin: int = 0, count: int | None = None
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Yield `count` elements of the flattened tensor from `begin` on, a few at a time.

        An array is valid until the next is asked for.

        Raises: CheckpointError as `read`, and if the file has become shorter.
        """
        ...

    def fill(
        self, name: str, out: Shaped[np.ndarray, " elements"], begin: int = 0
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Write as many elements as `out` has into it, rounded to its dtype; yield each new part.

        Nothing is written that is not asked for; a part is yielded while it is in the cache.

        Raises: CheckpointError as `pieces`.
        """
        ...

    def codes(self, name: str, begin: int = 0, count: int | None = None) -> Iterator[StoredCodes]:
        """Yield whole rows of a tensor that is stored as codes, a few at a time.

        `begin` and `count` are in elements, as those of `pieces`, and mean whole rows.

        Raises: CheckpointError as `pieces`.
        """
        ...

    def close(self) -> None:
        """Refuse further reads and release the mapping once no array that was read needs it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checked entry and the bytes of the mapping that hold it."""

    entry: TensorEntry
    mapped: "MappedFile"
    path: Path
    offset: int
    num_bytes: int


Decode = Callable[[StoredTensor, UInt8[np.ndarray, " bytes"]], Shaped[np.ndarray, " elements"]]
DecodeCodes = Callable[[StoredTensor, UInt8[np.ndarray, " bytes"]], StoredCodes]


class MappedTensors:
    """The `TensorFile` of every format: `decode` turns a tensor's bytes into its elements.

    `decode_codes` does for rows of the entries that have `codes`.
    """

    def __init__(
        self,
        path: Path,
        stored: Iterable[StoredTensor],
        metadata: Mapping[str, object],
        decode: Decode,
        decode_codes: DecodeCodes | None = None,
    ) -> None:
        self._path = path
        self._stored = {tensor.entry.name: tensor for tensor in stored}
        self._decode, self._decode_codes = decode, decode_codes
        self.entries = {name: tensor.entry for name, tensor in self._stored.items()}
        self.metadata = metadata
        self.paths = sorted({tensor.path for tensor in self._stored.values()})

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return one tensor, read-only (see `TensorFile.read`)."""
        tensor = self._find(name)
        raw = np.frombuffer(tensor.mapped, np.uint8, tensor.num_bytes, tensor.offset)
        array = self._decode(tensor, raw).reshape(tensor.entry.shape)
        array = np.require(array, requirements="A")  # an odd header length misaligns a whole file
        array.flags.writeable = False
        return array

    def pieces(
        self, name: str, begin: int = 0, count: int | None = None
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Yield elements of the flattened tensor (see `TensorFile.pieces`)."""
        tensor = self._find(name)
        size = math.prod(tensor.entry.shape)
        end = size if count is None else begin + count
        if begin == end:
            return
        # Quantized rows are whole blocks, so that rows can be decoded alone.
        row = tensor.entry.shape[-1] if tensor.entry.shape else 1
        rows = range(begin // row, -(-end // row), max(1, PIECE_ELEMENTS // row))
        for first, raw in _rows_of(tensor, row, rows):
            values = self._decode(tensor, raw)
            yield values[max(0, begin - first * row) : end - first * row]

    def codes(self, name: str, begin: int = 0, count: int | None = None) -> Iterator[StoredCodes]:
        """Yield whole rows as codes (see `TensorFile.codes`)."""
        tensor = self._find(name)
        row, size = tensor.entry.shape[-1], math.prod(tensor.entry.shape)
        end = size if count is None else begin + count
        if self._decode_codes is None or tensor.entry.codes is None or begin % row or end % row:
            raise CheckpointError(
                f"elements {begin} to {end} of {quoted(name)} are no rows of codes"
            )
        # Sixteen rows become columns that lie side by side.
        step = max(16, CODE_ELEMENTS // row // 16 * 16)
        for _, raw in _rows_of(tensor, row, range(begin // row, end // row, step)):
            yield self._decode_codes(tensor, raw)

    def fill(
        self, name: str, out: Shaped[np.ndarray, " elements"], begin: int = 0
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Write elements into `out`, part by part (see `TensorFile.fill`)."""
        tensor, at = self._find(name), 0
        if tensor.entry.dtype == out.dtype.name:
            self._decode(tensor, np.empty(0, np.uint8))  # refuses a dtype that is no weight's
            for at in range(0, out.size, PIECE_ELEMENTS):
                part = out[at : at + PIECE_ELEMENTS]
                _read_at(tensor, part.view(np.uint8), (begin + at) * part.itemsize)
                yield part
            return
        for values in self.pieces(name, begin, out.size):
            part = out[at : at + values.size]
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(part, values, casting="unsafe")
            at += values.size
            yield part

    def _find(self, name: str) -> StoredTensor:
        if name not in self.entries:
            raise CheckpointError(
                f"{self._path} has no tensor {quoted(name)}",
                why=f"it holds {len(self.entries)} tensors under other names",
            )
        if name not in self._stored:
            raise CheckpointError(f"{self._path} is closed: tensor {quoted(name)} cannot be read")
        return self._stored[name]

    def close(self) -> None:
        """Refuse further reads; arrays already read stay valid."""
        self._stored = {}


class MappedFile(mmap.mmap):
    """A file in memory, with a descriptor of its own through which it can be read as well."""

    descriptor: int


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what the system says of files, such as that they may not be read, into our error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            why=str(error),
            fix="check its permissions and links",
        ) from error


def map_file(path: Path) -> MappedFile:
    """Map a regular, non-empty file for reading."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise CheckpointError(
                f"{path} is empty (0 bytes)",
                why="a download or copy was cut off before its first byte",
                fix="fetch the file again",
            )
        with path.open("rb") as file:
            mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.descriptor = os.dup(file.fileno())
            weakref.finalize(mapped, os.close, mapped.descriptor)
            return mapped
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error


def _rows_of(
    tensor: StoredTensor, row: int, rows: range
) -> Iterator[tuple[int, UInt8[np.ndarray, " bytes"]]]:
    """Yield the first of some rows of `row` elements, and their bytes until the next are read."""
    row_bytes = tensor.num_bytes * row // math.prod(tensor.entry.shape)
    buffer = np.empty(min(rows.step, len(range(rows.start, rows.stop))) * row_bytes, np.uint8)
    for first in rows:
        raw = buffer[: (min(first + rows.step, rows.stop) - first) * row_bytes]
        _read_at(tensor, raw, first * row_bytes)
        yield first, raw


def _read_at(tensor: StoredTensor, out: UInt8[np.ndarray, " bytes"], at: int) -> None:
    """Fill `out` with a tensor's bytes from its byte `at` on; other threads run meanwhile."""
    start = tensor.offset + at
    if not hasattr(os, "preadv"):  # Windows
        out[...] = np.frombuffer(tensor.mapped, np.uint8, out.size, start)
        return
    done = 0
    while done < out.size:
        try:
            count = os.preadv(tensor.mapped.descriptor, [memoryview(out)[done:]], start + done)
        except OSError as error:
            raise CheckpointError(f"{tensor.path} cannot be read", why=str(error)) from error
        if count == 0:
            raise CheckpointError(
                f"{tensor.path} ends inside tensor {quoted(tensor.entry.name)}",
                why="the file has become shorter since it was opened",
                fix="load it again when nothing writes to it",
            )
        done += count


def count_elements(shape: tuple[int, ...]) -> int | None:
    """Return the number of elements, or None for a shape no array can have.

    The limit's product leaves out extents of zero, as NumPy's does: it refuses (0, 2**62).
    """
    limit = 2**48  # above any tensor in use, and small enough that byte counts stay below 2**63
    if len(shape) > 32 or min(shape, default=0) < 0 or max(shape, default=0) > limit:
        return None
    return None if math.prod(max(extent, 1) for extent in shape) > limit else math.prod(shape)


def check_no_overlap(stored: Iterable[StoredTensor]) -> None:
    """Raise if two tensors of one file share a byte."""
    previous, end = "", 0
    for tensor in sorted(stored, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.num_bytes and tensor.offset < end:
            raise CheckpointError(
                f"{tensor.path}: tensor {quoted(tensor.entry.name)} overlaps {quoted(previous)}",
                why=f"it begins at byte {tensor.offset}, the other ends at byte {end}",
                fix="the header is damaged or forged: fetch the file again",
            )
        previous, end = tensor.entry.name, max(end, tensor.offset + tensor.num_bytes)


def refuse_pickle(path: Path, found: str) -> None:
    """Raise the error that tells why a pickle checkpoint is not read and what to do instead."""
    raise CheckpointError(
        f"{path}: {found} is a pickle checkpoint, which is refused",
        why="loading a pickle runs whatever code its author put in it",
        fix="use the model's .safetensors files, or convert it where you trust it: read it with "
        "torch.load(..., weights_only=True), write the tensors with safetensors.torch.save_file",
    )


def describe_start(start: bytes) -> str:
    """Say what a file of an unexpected format seems to be, from its first bytes, or ''."""
    if start[4:8] == bytes(4):  # a plausible header length of safetensors, whatever it spells
        return ""
    pickle = "it is a pickle, which is refused because loading one runs code"
    kinds = {
        b"version https://git-lfs": "it is a Git LFS pointer: the real file was never fetched",
        b"GGUF": "it is a GGUF file",
        b"PK\x03\x04": "it is a zip archive, as torch.save writes: a pickle, which is refused",
        b"<": "it looks like a web page, such as an error page saved in the file's place",
    } | {bytes([0x80, protocol]): pickle for protocol in range(2, 6)}
    return next((kind for prefix, kind in kinds.items() if start.startswith(prefix)), "")


def quoted(text: str) -> str:
    """Quote a name from a file for an error message: escaped, and cut at 100 characters."""
    return repr(text if len(text) <= 100 else text[:97] + "...")
