"""Reads the leaves of a model: tensors through threads into their final place and dtype.

What is in memory at a time is what stays, plus the tensors that the leaves being built are made of.
A leaf that is a tensor as it is stored is read straight into its place; others are read in their
final dtype and rearranged into it, or packed a few rows at a time.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from inferjax.checkpoint.matching import Leaf
from inferjax.checkpoint.memory import AnyValues, Room, Scratch, Take, aligned_empty, is_aligned
from inferjax.checkpoint.packing import Packing, read_packed
from inferjax.checkpoint.tensor_file import CODE_ELEMENTS, TensorFile, quoted
from inferjax.checkpoint.values import extremes_are_finite, read_values, refuse_values
from inferjax.models.gguf_format import Stored
from inferjax.models.placed import put
from inferjax.quant.leaf import PackedLeaf

MAX_THREADS = 8
# Small leaves may be built side by side even where none is large.
_MIN_ROOM_BYTES = 32 * 2**20
# What a few rows take as they are stored, as values, rounded, and as codes.
_PACKING_BYTES = 32 * CODE_ELEMENTS
_SCRATCH = Scratch()


def read_leaves(
    file: TensorFile,
    leaves: Sequence[Leaf],
    where: str,
    done: Callable[[Leaf], object],
    places: Sequence[Any] | None = None,
) -> list[Array | PackedLeaf]:
    """Return the weights on their devices, calling `done` after each.

    `where` names the checkpoint in errors. `places` are those of the leaves on a mesh; the host
    then holds no more at a time than building the largest one takes, its final form included.

    Raises: CheckpointError for values that are not finite, or too large for the leaf's dtype;
      UnsupportedConfig for those that a scheme's scales cannot hold.
    """
    sizes = [_temporary_bytes(leaf) + (leaf.num_bytes if places else 0) for leaf in leaves]
    room = Room(max([_MIN_ROOM_BYTES, *sizes]))

    def read(leaf: Leaf, num_bytes: int, place: Any) -> Array | PackedLeaf:
        with room.of(num_bytes):
            array = read_leaf(file, leaf, where, place)
        done(leaf)
        return array

    pool = ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1))
    try:
        return list(pool.map(read, leaves, sizes, places or [None] * len(leaves)))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_leaf(file: TensorFile, leaf: Leaf, where: str, place: Any = None) -> Array | PackedLeaf:
    """Return one weight on its devices, which are done with the host's copy."""
    if leaf.packing is None:
        weight = _read_array(file, leaf, where)
    else:
        weight = _read_packed(file, leaf, leaf.packing, where)
    on_devices = jax.device_put(weight) if place is None else put(weight, place)
    return jax.block_until_ready(on_devices)


def _read_array(file: TensorFile, leaf: Leaf, where: str) -> AnyValues:
    take = aligned_empty if _is_stored_as_is(leaf) else _SCRATCH.clear().take
    parts = [_read_tensor(file, read, leaf.dtype, where, take) for read in leaf.reads]
    return _placed(leaf.build(*parts), leaf)


def _read_packed(file: TensorFile, leaf: Leaf, packing: Packing, where: str) -> PackedLeaf:
    """Pack a weight row by row; one that mixes rows is built whole first."""
    if packing.columns is None:
        take, dtype = _SCRATCH.clear().take, packing.values_dtype.name
        weight = leaf.build(*(_read_tensor(file, read, dtype, where, take) for read in leaf.reads))
        what = f"tensor {quoted(leaf.reads[0].parts[0].name)} of {where}"
        return jax.tree.map(_in_place, packing.pack(weight, what))
    parts = tuple(part for read in leaf.reads for part in read.parts)
    return read_packed(file, parts, packing, where)


def _is_stored_as_is(leaf: Leaf) -> bool:
    """Tell whether a leaf is one tensor, so that it can be read into its place."""
    if len(leaf.reads) != 1:
        return False
    [stored] = leaf.reads
    if stored.build is not None:
        return False
    probe = np.broadcast_to(np.zeros((), leaf.dtype), stored.parts[0].shape)
    return leaf.build(probe) is probe


def _read_tensor(file: TensorFile, read: Stored, dtype: str, where: str, take: Take) -> AnyValues:
    """Return what a leaf is built of: in the leaf's dtype, unless arithmetic comes first."""
    if read.build is None:
        [part] = read.parts
        return read_values(file, part.name, part.begin, take(part.shape, np.dtype(dtype)), where)
    exact = np.dtype(np.float32)
    return read.build(
        *(
            read_values(file, part.name, part.begin, take(part.shape, exact), where)
            for part in read.parts
        )
    )


def _placed(values: AnyValues, leaf: Leaf) -> AnyValues:
    """Return the values in the leaf's dtype and order, in memory that can be handed over."""
    dtype = np.dtype(leaf.dtype)
    if values.dtype == dtype:
        return _in_place(values)
    out = aligned_empty(leaf.shape, dtype)
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if not extremes_are_finite(out):
        refuse_values([values], out, f"tensor {quoted(leaf.reads[0].parts[0].name)}")
    return out


def _in_place(values: AnyValues) -> AnyValues:
    """Return an array in memory that can be handed over and is not used again."""
    if values.flags.c_contiguous and is_aligned(values) and not _SCRATCH.holds(values):
        return values
    out = aligned_empty(values.shape, values.dtype)
    np.copyto(out, values)
    return out


def _temporary_bytes(leaf: Leaf) -> int:
    """Return what building a leaf takes beside its place: its parts, and perhaps them joined."""
    if leaf.packing is None:
        return leaf.num_bytes * min(2, len(leaf.reads))
    if leaf.packing.columns is not None:
        return _PACKING_BYTES
    return 3 * math.prod(leaf.shape) * leaf.packing.values_dtype.itemsize
