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
from jaxtyping import Array, Shaped, UInt8

from inferjax.checkpoint.matching import Leaf
from inferjax.checkpoint.tensor_file import TensorFile, quoted
from inferjax.errors import CheckpointError
from inferjax.models.gguf_format import Part, Stored

MAX_THREADS = 8
_ALIGNMENT = 64  # from which on XLA's CPU client takes an array over instead of copying it
_OWN_PAGES_BYTES = 2**18
_SCRATCH_BYTES = 16 * 2**20
# Small leaves may be built side by side even where none is large.
_MIN_ROOM_BYTES = 32 * 2**20

AnyValues = Shaped[np.ndarray, "..."]
Take = Callable[[tuple[int, ...], np.dtype], AnyValues]


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
    take = aligned_empty if _is_stored_as_is(leaf) else _SCRATCH.clear().take
    parts = [_read_tensor(file, read, leaf.dtype, where, take) for read in leaf.reads]
    return jax.block_until_ready(jax.device_put(_placed(leaf.build(*parts), leaf)))


def _is_stored_as_is(leaf: Leaf) -> bool:
    """Tell whether a leaf is one tensor, so that it can be read into its place."""
    if len(leaf.reads) != 1:
        return False
    [stored] = leaf.reads
    if stored.build is not None:
        return False
    probe = np.broadcast_to(np.zeros((), leaf.dtype), stored.parts[0].shape)
    return leaf.build(probe) is probe


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


def _read_tensor(file: TensorFile, read: Stored, dtype: str, where: str, take: Take) -> AnyValues:
    """Return what a leaf is built of: in the leaf's dtype, unless arithmetic comes first."""
    if read.build is None:
        [part] = read.parts
        return _read_part(file, part, take(part.shape, np.dtype(dtype)), where)
    exact = np.dtype(np.float32)
    return read.build(
        *(_read_part(file, part, take(part.shape, exact), where) for part in read.parts)
    )


def _read_part(file: TensorFile, part: Part, out: AnyValues, where: str) -> AnyValues:
    for piece in file.fill(part.name, out.reshape(-1), part.begin):
        if not _extremes_are_finite(piece):
            stored = file.pieces(part.name, part.begin, out.size)
            _refuse_values(stored, out, f"tensor {quoted(part.name)} of {where}")
    return out


def _placed(values: AnyValues, leaf: Leaf) -> AnyValues:
    """Return the values in the leaf's dtype and order, in memory that can be handed over."""
    dtype = np.dtype(leaf.dtype)
    fits = values.dtype == dtype and values.flags.c_contiguous and _is_aligned(values)
    if fits and not _SCRATCH.holds(values):
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


class _Scratch(threading.local):
    """A thread's memory for the tensors of one leaf after the other.

    New pages cost as much as reading: with memory of their own for every leaf, loading took half as
    long again. What is larger has pages of its own, so that little stays in memory.
    """

    def __init__(self) -> None:
        self._buffer: UInt8[np.ndarray, " bytes"] | None = None
        self._used = 0

    def clear(self) -> "_Scratch":
        """Give all memory out anew."""
        self._used = 0
        return self

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> AnyValues:
        """Return memory that is valid until the next `clear`."""
        if self._buffer is None:
            self._buffer = aligned_empty((_SCRATCH_BYTES,), np.dtype(np.uint8))
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used
        if start + num_bytes > _SCRATCH_BYTES:
            return aligned_empty(shape, dtype)
        self._used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._buffer[start : start + num_bytes].view(dtype).reshape(shape)

    def holds(self, values: AnyValues) -> bool:
        """Tell whether values lie in this memory."""
        return self._buffer is not None and np.may_share_memory(values, self._buffer)


_SCRATCH = _Scratch()


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
