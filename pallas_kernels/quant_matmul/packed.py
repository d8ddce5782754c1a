"""Weights packed for streaming: sixteen columns side by side, whole cache lines in order of use.

A line is 64 bytes: sixteen 32-bit words, one a column, each holding the next 1, 2, 4 or 8 values of
that column. Rows beyond `num_in` and columns beyond `num_out` are zero. Everything here works on
NumPy and JAX arrays alike and keeps leading axes (of experts) as they are.

| format | values | words hold |
|---|---|---|
| float32 | float32 `[..., N/16, K, 16]` | 1 |
| bfloat16, float16 | `[..., N/16, K/2, 16, 2]` | 2 |
| int8, float8 | int8 or float8_e4m3fn `[..., N/16, K/4, 16, 4]` | 4 |
| int4 | uint8 `[..., N/16, K/8, 16, 4]`, low nibbles the first four k, high nibbles the next | 8 |
"""

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Num

LANES = 16
# The order is the kernel's: cpu_problem.h names the same six.
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "float8")
QUANTIZED = ("int8", "int4", "float8")
VALUES_PER_WORD = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 2,
    "int8": 4,
    "int4": 8,
    "float8": 4,
}
VALUE_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.uint8),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
}
MAX_GROUP = 256
INT4_ZERO = 8

# NumPy or JAX arrays.
AnyArray = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "minimums"),
    meta_fields=("format", "num_in", "num_out", "group"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A `[num_in, num_out]` matrix; its entry is `code * scale + minimum` of its column's group.

    `group` rows share a scale and a minimum, `[..., N/16, num_in/group, 16]`, both in float32 or
    both in float16; 0 means all rows. An int4 code is 0..15 with minimums, 0..15 less 8 without.
    """

    values: AnyArray
    scales: AnyArray | None = None
    minimums: AnyArray | None = None
    format: str
    num_in: int
    num_out: int
    group: int = 0


def pack(weight: Float[AnyArray, "... K N"], format: str) -> PackedWeight:
    """Pack a matrix as float32, bfloat16 or float16, rounding to that format.

    Raises: ValueError for another format.
    """
    if format not in FORMATS or format in QUANTIZED:
        raise ValueError(f"pack takes float32, bfloat16 or float16, not {format!r}")
    num_in, num_out = weight.shape[-2:]
    values = _pack_values(weight.astype(VALUE_DTYPES[format]), format)
    return PackedWeight(values=values, format=format, num_in=num_in, num_out=num_out)


def pack_codes(
    codes: Num[AnyArray, "... K N"],
    scales: Float[AnyArray, "... G N"],
    minimums: Float[AnyArray, "... G N"] | None = None,
    *,
    format: str,
    group: int = 0,
) -> PackedWeight:
    """Pack codes that a quantizer chose, with the scale (and minimum) of each group of rows.

    Codes are int8 values, float8_e4m3fn values, or int4 codes: -8..7 without minimums, 0..15 with.
    Scales and minimums that all are float16 stay so; everything else is computed in float32.

    Raises: ValueError when format, group and shapes do not agree.
    """
    num_in, num_out = codes.shape[-2:]
    if format not in QUANTIZED:
        raise ValueError(f"pack_codes takes {', '.join(QUANTIZED)}, not {format!r}")
    if group < 0 or group > MAX_GROUP or group % 8:
        raise ValueError(f"a group is 0 or a multiple of 8 up to {MAX_GROUP}, not {group}")
    groups = -(-num_in // group) if group else 1
    for name, array in (("scales", scales), ("minimums", minimums)):
        wanted = (*codes.shape[:-2], groups, num_out)
        if array is not None and array.shape != wanted:
            raise ValueError(f"{name} have shape {array.shape}, codes and group need {wanted}")
    if format == "int4":
        codes = codes.astype(np.int8) + np.int8(0 if minimums is not None else INT4_ZERO)
    kept = {array.dtype for array in (scales, minimums) if array is not None}
    shared = np.dtype(np.float16 if kept == {np.dtype(np.float16)} else np.float32)
    return PackedWeight(
        values=_pack_values(codes.astype(VALUE_DTYPES[format]), format),
        scales=_blocks(scales.astype(shared)),
        minimums=None if minimums is None else _blocks(minimums.astype(shared)),
        format=format,
        num_in=num_in,
        num_out=num_out,
        group=group,
    )


def unpack(weight: PackedWeight) -> Num[AnyArray, "... K N"]:
    """Return the codes as `pack_codes` took them, or the floats as `pack` rounded them."""
    values = weight.values
    if weight.format == "float32":
        values = values[..., None]
    if weight.format == "int4":
        xp = values.__array_namespace__()
        nibbles = xp.concat([values & np.uint8(15), values >> np.uint8(4)], axis=-1)
        values = nibbles.astype(np.int8)
        if weight.minimums is None:
            values = values - np.int8(INT4_ZERO)
    *lead, blocks, words, lanes, step = values.shape
    values = _swap(values, -2, -1).reshape(*lead, blocks, words * step, lanes)
    return _unblocks(values)[..., : weight.num_in, : weight.num_out]


def dequantize(weight: PackedWeight) -> Float[AnyArray, "... K N"]:
    """Return the matrix in float32."""
    values = unpack(weight).astype(np.float32)
    if weight.scales is None:
        return values
    values = values * _rows_of_groups(weight, weight.scales)
    if weight.minimums is None:
        return values
    return values + _rows_of_groups(weight, weight.minimums)


def take_rows(weight: PackedWeight, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Read rows of an embedding `[V, D]` that is packed as its transpose, `num_out` being V.

    Rows are float32; ids outside the table read its first or last row.
    """
    ids = ids.clip(0, weight.num_out - 1)
    block, lane = ids // LANES, ids % LANES

    def column(packed: AnyArray) -> AnyArray:
        """Return [..., blocks, rows, lanes(, step)] with one block of one lane for each id."""
        taken = packed[block, :, lane]
        tail = taken.shape[ids.ndim + 1 :]
        return taken.reshape(*ids.shape, 1, packed.shape[1], 1, *tail)

    columns = jax.tree.map(column, weight)
    return dequantize(dataclasses.replace(columns, num_out=1))[..., 0]


def put_columns(weight: PackedWeight, part: PackedWeight, columns: Int[np.ndarray, " n"]) -> None:
    """Write columns of a part where `columns` says, in place into NumPy arrays; -1 is nowhere.

    Matrices may be stacked: their columns are counted through. The part is one matrix.
    """
    chosen = np.flatnonzero(columns >= 0)
    stack, column = np.divmod(columns[chosen], weight.num_out)
    whole_lines = not (len(columns) % LANES or len(chosen) != len(columns))
    in_line = whole_lines and not column[0] % LANES and bool((np.diff(columns) == 1).all())
    for array, piece in zip(jax.tree.leaves(weight), jax.tree.leaves(part), strict=True):
        num_blocks = -(-weight.num_out // LANES)
        blocks = array.reshape(-1, *array.shape[array.ndim - piece.ndim + 1 :])
        at = stack * num_blocks + column // LANES
        if in_line and stack[0] == stack[-1]:
            blocks[at[0] : at[0] + len(piece)] = piece
        else:
            blocks[at, :, column % LANES] = piece[chosen // LANES, :, chosen % LANES]


def _rows_of_groups(weight: PackedWeight, packed: AnyArray) -> Float[AnyArray, "... K N"]:
    """Return what the groups of rows share, once for each row."""
    shared = _unblocks(packed)[..., : weight.num_out].astype(np.float32)
    xp = shared.__array_namespace__()
    if not weight.group:
        return shared
    return xp.repeat(shared, weight.group, axis=-2)[..., : weight.num_in, :]


def _pack_values(values: AnyArray, format: str) -> AnyArray:
    """Interleave a `[..., K, N]` matrix of the format's own values, padded with zeros."""
    step = VALUES_PER_WORD[format]
    values = _blocks(_pad(values, -2, step))
    if step == 1:
        return values
    *lead, blocks, rows, lanes = values.shape
    values = _swap(values.reshape(*lead, blocks, rows // step, step, lanes), -2, -1)
    if format == "int4":
        return values[..., :4] | values[..., 4:] << np.uint8(4)
    return values


def _blocks(matrix: AnyArray) -> AnyArray:
    """Cut `[..., R, N]` into blocks of sixteen columns, `[..., N/16, R, 16]`."""
    matrix = _pad(matrix, -1, LANES)
    *lead, rows, columns = matrix.shape
    return _swap(matrix.reshape(*lead, rows, columns // LANES, LANES), -3, -2)


def _unblocks(blocks: AnyArray) -> AnyArray:
    *lead, num_blocks, rows, lanes = blocks.shape
    return _swap(blocks, -3, -2).reshape(*lead, rows, num_blocks * lanes)


def _swap(array: AnyArray, a: int, b: int) -> AnyArray:
    return array.__array_namespace__().swapaxes(array, a, b)


def _pad(array: AnyArray, axis: int, multiple: int) -> AnyArray:
    """Append zeros until an axis is a multiple."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    xp = array.__array_namespace__()
    shape = list(array.shape)
    shape[axis] = missing
    return xp.concat([array, xp.zeros(shape, dtype=array.dtype)], axis=axis)
