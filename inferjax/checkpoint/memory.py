"""Memory for weights: what XLA takes over without a copy, and what is used again and again."""

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from jaxtyping import Shaped, UInt8

ALIGNMENT = 64  # from which on XLA's CPU client takes an array over instead of copying it
_OWN_PAGES_BYTES = 2**18
_SCRATCH_BYTES = 16 * 2**20

AnyValues = Shaped[np.ndarray, "..."]
Take = Callable[[tuple[int, ...], np.dtype], AnyValues]


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
        buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> AnyValues:
    """Return `aligned_empty` filled with zeros, which new pages are already."""
    out = aligned_empty(shape, dtype)
    if out.nbytes < _OWN_PAGES_BYTES:
        out.fill(0)
    return out


def return_free_memory() -> None:
    """Give freed memory that the heap keeps back to the system, where the C library can."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def is_aligned(values: AnyValues) -> bool:
    """Tell whether XLA takes an array over as it is."""
    return values.ctypes.data % ALIGNMENT == 0


class Scratch(threading.local):
    """A thread's memory for the tensors of one leaf after the other.

    New pages cost as much as reading: with memory of their own for every leaf, loading took half as
    long again. What is larger has pages of its own, so that little stays in memory.
    """

    def __init__(self) -> None:
        self._buffer: UInt8[np.ndarray, " bytes"] | None = None
        self._used = 0

    def clear(self) -> "Scratch":
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
        self._used = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._buffer[start : start + num_bytes].view(dtype).reshape(shape)

    def holds(self, values: AnyValues) -> bool:
        """Tell whether values lie in this memory."""
        return self._buffer is not None and np.may_share_memory(values, self._buffer)


class Room:
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
