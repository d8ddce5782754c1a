"""What a checkpoint file is to the loader: named tensors, read one at a time from a memory map.

Formats parse and check their headers, then hand over where each tensor lies.
"""

import dataclasses
import math
import mmap
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped, UInt8

from inferjax.errors import CheckpointError

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as its file declares it.

    `dtype` is NumPy's name ("float32", "bfloat16") or a quantized GGUF type ("q4_k"); `shape` is
    row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


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

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return one tensor, read-only: in its stored dtype, or in float32 if it is quantized.

        Raises: CheckpointError for an unknown name, a dtype that is no weight's, or a closed file.
        """
        ...

    def close(self) -> None:
        """Refuse further reads and release the mapping once no array that was read needs it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checked entry and the bytes of the mapping that hold it."""

    entry: TensorEntry
    mapped: mmap.mmap
    path: Path
    offset: int
    num_bytes: int


Decode = Callable[[StoredTensor, UInt8[np.ndarray, " bytes"]], Shaped[np.ndarray, " elements"]]


class MappedTensors:
    """The `TensorFile` of every format: `decode` turns a tensor's bytes into its elements."""

    def __init__(
        self,
        path: Path,
        stored: Iterable[StoredTensor],
        metadata: Mapping[str, object],
        decode: Decode,
    ) -> None:
        self._path = path
        self._stored = {tensor.entry.name: tensor for tensor in stored}
        self._decode = decode
        self.entries = {name: tensor.entry for name, tensor in self._stored.items()}
        self.metadata = metadata

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return one tensor, read-only (see `TensorFile.read`)."""
        if name not in self.entries:
            raise CheckpointError(
                f"{self._path} has no tensor {quoted(name)}",
                why=f"it holds {len(self.entries)} tensors under other names",
            )
        if name not in self._stored:
            raise CheckpointError(f"{self._path} is closed: tensor {quoted(name)} cannot be read")
        tensor = self._stored[name]
        raw = np.frombuffer(tensor.mapped, np.uint8, tensor.num_bytes, tensor.offset)
        array = self._decode(tensor, raw).reshape(tensor.entry.shape)
        array = np.require(array, requirements="A")  # an odd header length misaligns a whole file
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Refuse further reads; arrays already read stay valid."""
        self._stored = {}


def map_file(path: Path) -> mmap.mmap:
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
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error


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
