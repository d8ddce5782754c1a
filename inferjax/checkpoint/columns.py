"""Finds which column of a packed weight each stored row becomes: one output's weights either way.

A leaf rearranges the tensors of a checkpoint, and knows nothing of columns. Run on numbers in place
of values, the same functions tell where everything goes. That takes eight bytes for every value
of the largest fused weight, before any is read.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Shaped

from inferjax.models.gguf_format import Stored
from inferjax.models.params import ArraySpec
from inferjax.quant.leaf import as_matrix

Columns = Int32[np.ndarray, " _"]


def find_columns(
    reads: Sequence[Stored], build: Callable[..., Any], spec: ArraySpec
) -> tuple[Columns | None, ...] | None:
    """Return for each stored part the column of each of its rows, all axes but the last.

    A row that the weight leaves out has -1, and a part of which it takes no row has None. Columns
    of a stack of matrices are counted through. The result is None unless every column is one whole
    row, in its order, and nothing is computed: only then do groups along a row stay whole.
    """
    shapes = [part.shape for read in reads for part in read.parts]
    if not all(shapes) or 0 in spec.shape:
        return None
    counts = [math.prod(shape[:-1]) for shape in shapes]
    starts = [0, *itertools.accumulate(counts)]

    def matrix(numbers: Sequence[Int[np.ndarray, "..."]]) -> Shaped[np.ndarray, "*stack K N"]:
        given = iter(np.broadcast_to(n, s) for n, s in zip(numbers, shapes, strict=True))
        tensors = [_build(read, [next(given) for _ in read.parts]) for read in reads]
        return as_matrix(build(*tensors), spec.num_in_axes, spec.num_batch_axes)

    ids = np.arange(starts[-1], dtype=np.int32)
    owners = matrix(
        [
            ids[start : start + count].reshape(*shape[:-1], 1)
            for start, count, shape in zip(starts, counts, shapes, strict=False)
        ]
    )
    num_in, rows = owners.shape[-2], owners[..., 0, :].flatten()
    if not (_is_constant(owners, -2) and _are_distinct(rows, len(ids))):
        return None
    del owners  # four bytes a value, as what follows
    if not _is_counted(matrix([np.arange(shape[-1], dtype=np.int32) for shape in shapes])):
        return None
    columns = np.full(len(ids), -1, np.int32)
    columns[rows.astype(np.int32)] = np.arange(rows.size, dtype=np.int32)
    found = [columns[a:b] for a, b in itertools.pairwise(starts)]
    used = [part if (part >= 0).any() else None for part in found]
    lengths = {shape[-1] for shape, part in zip(shapes, used, strict=True) if part is not None}
    return tuple(used) if lengths == {num_in} else None


def _build(read: Stored, parts: Sequence[Any]) -> Any:
    return parts[0] if read.build is None else read.build(*parts)


def _is_constant(matrix: Shaped[np.ndarray, "..."], axis: int) -> bool:
    """Compare extremes, which needs no memory of the matrix's size."""
    return np.array_equal(matrix.min(axis=axis), matrix.max(axis=axis))


def _is_counted(matrix: Shaped[np.ndarray, "*stack K N"]) -> bool:
    """Tell whether every column counts from 0 on."""
    others = (*range(matrix.ndim - 2), matrix.ndim - 1)
    counted = np.arange(matrix.shape[-2])
    low, high = matrix.min(axis=others), matrix.max(axis=others)
    return np.array_equal(low, counted) and np.array_equal(high, counted)


def _are_distinct(rows: Shaped[np.ndarray, " N"], limit: int) -> bool:
    """Tell whether rows' numbers were moved only: arithmetic would repeat some, or leave range."""
    return bool(rows.min() >= 0 and rows.max() < limit and np.unique(rows).size == rows.size)
