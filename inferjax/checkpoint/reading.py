"""Reads the leaves of a model: tensors through threads into their final place and dtype.

What is in memory at a time is what stays, plus the tensors that the leaves being built are made of.
A leaf that is a tensor as it is stored is read straight into its place; others are read in their
final dtype and rearranged into it.
"""

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, Shaped

from inferjax.checkpoint.matching import Leaf
from inferjax.checkpoint.tensor_file import TensorFile, quoted
from inferjax.errors import CheckpointError
from inferjax.models.gguf_format import Part, Stored

MAX_THREADS = 8
_ALIGNMENT = 64  # from which on XLA's CPU client takes an array over instead of copying it
_OWN_PAGES_BYTES = 2**18
# Small leaves may be built side by side even where none is large.
_MIN_ROOM_BYTES = 32 * 2**20

AnyValues = Shaped[np.ndarray, "..."]


def read_leaves(
    file: TensorFile, leaves: Sequence[Leaf], where: str, done: Callable[[Leaf], object]
) -> list[Array]:
    """Return the weights on their device, calling `done` after each.

    `where` names the checkpoint in errors.

    Raises: CheckpointError for values that are not finite, or too large for the leaf's dtype.
    """
    room = _Room(max([_MIN_ROOM_BYTES, *map(_temporary_bytes, leaves)]))

    def read(leaf: Leaf) -> Array:
        with room.of(_temporary_bytes(leaf)):
            array = read_leaf(file, leaf, where)
        done(leaf)
        return array

    pool = ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1))
    try:
        return list(pool.map(read, leaves))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_leaf(file: TensorFile, leaf: Leaf, where: str) -> Array:
    """Return one weight on its device, which is done with the host's copy."""
    parts = [_read_tensor(file, read, leaf.dtype, where) for read in leaf.reads]
    return jax.block_until_ready(jax.device_put(_placed(leaf.build(*parts), leaf)))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> AnyValues:
    """Return memory that XLA's CPU client takes over as it is.

    Large arrays have pages of their own, which go back to the system when the array goes: the heap
    kept 75 MB of temporaries between the weights of a model of 538 MB.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _OWN_PAGES_BYTES:
        pages = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        buffer = np.frombuffer(pages, np.uint8)
    else:
        buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _read_tensor(file: TensorFile, read: Stored, dtype: str, where: str) -> AnyValues:
    """Return what a leaf is built of: in the leaf's dtype, unless arithmetic comes first."""
    if read.build is None:
        [part] = read.parts
        return _read_part(file, part, np.dtype(dtype), where)
    exact = np.dtype(np.float32)
    return read.build(*(_read_part(file, part, exact, where) for part in read.parts))


def _read_part(file: TensorFile, part: Part, dtype: np.dtype, where: str) -> AnyValues:
    out = aligned_empty(part.shape, dtype)
    for piece in file.fill(part.name, out.reshape(-1), part.begin):
        if not _extremes_are_finite(piece):
            stored = file.pieces(part.name, part.begin, out.size)
            _refuse_values(stored, out, f"tensor {quoted(part.name)} of {where}")
    return out


def _placed(values: AnyValues, leaf: Leaf) -> AnyValues:
    """Return the values in the leaf's dtype and order, in memory that can be handed over."""
    dtype = np.dtype(leaf.dtype)
    if values.dtype == dtype and values.flags.c_contiguous and _is_aligned(values):
        return values
    out = aligned_empty(leaf.shape, dtype)
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if values.dtype != dtype and not _extremes_are_finite(out):
        _refuse_values([values], out, f"tensor {quoted(leaf.reads[0].parts[0].name)}")
    return out


def _is_aligned(values: AnyValues) -> bool:
    return values.ctypes.data % _ALIGNMENT == 0


def _temporary_bytes(leaf: Leaf) -> int:
    """Return what building a leaf takes beside its place: its parts, and perhaps them joined."""
    return leaf.num_bytes * min(2, len(leaf.reads))


def _extremes_are_finite(values: AnyValues) -> bool:
    """Look at the exponents' bits of half-width floats, and at the extremes of others."""
    if values.size == 0:
        return True
    if values.dtype.itemsize == 2:
        top = 0x7C00 if values.dtype == np.float16 else 0x7F80
        return int((values.view(np.uint16) & 0x7FFF).max()) < top
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _refuse_values(stored: Iterable[AnyValues], out: AnyValues, what: str) -> NoReturn:
    """Raise for values that are not finite as they are stored, or once they are rounded to `out`'s.

    The error counts them all: only now is it worth the time.
    """
    bad = too_large = 0
    for values in stored:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(out.dtype)
        bad += _num_not_finite(values)
        too_large += _num_not_finite(rounded)
    if bad:
        raise CheckpointError(
            f"{what} has {bad} of {out.size} values that are NaN or infinite",
            why="the weights were damaged, or saved from a run that diverged",
            fix="fetch the checkpoint again, or use an earlier one",
            count=bad,
        )
    name = out.dtype.name
    raise CheckpointError(
        f"{what} has {too_large} of {out.size} values that are too large for {name}",
        why=f"{name} ends at {float(ml_dtypes.finfo(out.dtype).max):g}",
        fix="load the model as float32" if name == "bfloat16" else "load the model as bfloat16",
        count=too_large,
    )


def _num_not_finite(values: AnyValues) -> int:
    wide = values.astype(np.float64)
    return int(np.size(wide) - np.isfinite(wide).sum())


class _Room:
    """The bytes of temporaries that may exist at a time; one leaf may always be built."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Wait for room, and have it for a while."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= self._limit)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()
