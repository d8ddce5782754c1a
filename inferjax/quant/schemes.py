"""The ways to store a weight in fewer bits, by name, and rounding to them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange
from jaxtyping import Bool, Float, Num

from inferjax.errors import UnsupportedConfig
from pallas_kernels.quant_matmul import QUANTIZED, PackedWeight, pack, pack_codes
from pallas_kernels.quant_matmul.packed import VALUE_DTYPES

AnyArray = Any

_LARGEST = {"int8": 127.0, "float8": 448.0}
_INT4_STEPS = 15.0
# XLA on a CPU takes what is smaller for zero, and its inverse would be infinite.
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_HALF = np.finfo(np.float16)
_LEAST_HALF = np.float32(_HALF.smallest_subnormal)
_EXPONENT_BITS = np.int32(0x7F800000)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a matrix is stored: the format of its values, and how many rows share a scale.

    `group` 0 is a scale per column. `minimum` stores the smallest value of a group beside its
    scale, so that codes need not be symmetric. `scale_dtype` is that of scales and minimums:
    float32, or float16, which halves what a group of four-bit codes has beside them. `activations`
    is what the other factor is rounded to on the way into the product.
    """

    format: str
    group: int = 0
    minimum: bool = False
    scale_dtype: str = "float32"
    activations: str = "float32"


def _int4(group: int, minimum: bool = False, activations: str = "float32") -> Scheme:
    return Scheme(
        format="int4", group=group, minimum=minimum, scale_dtype="float16", activations=activations
    )


SCHEMES: dict[str, Scheme] = {
    "float32": Scheme(format="float32"),
    "bfloat16": Scheme(format="bfloat16"),
    "bfloat16-w16a16": Scheme(format="bfloat16", activations="bfloat16"),
    "float16": Scheme(format="float16"),
    "int8": Scheme(format="int8"),
    "int8-g128": Scheme(format="int8", group=128),
    "int8-w8a8": Scheme(format="int8", activations="int8"),
    "int4": _int4(group=32, minimum=True),
    "int4-w4a8": _int4(group=32, minimum=True, activations="int8"),
    "int4-g64": _int4(group=64),
    "int4-g128": _int4(group=128),
    "fp8": Scheme(format="float8"),
}


def scheme_named(name: object) -> Scheme:
    """Return a scheme of the table.

    Raises: UnsupportedConfig listing the known ones.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        raise UnsupportedConfig(
            f"quantize={str(name)[:40]!r}",
            why="there is no such scheme",
            fix=f"use one of {', '.join(SCHEMES)}",
        )
    return SCHEMES[name]


def round_to_nearest(matrix: Float[AnyArray, "*stack K N"], scheme: Scheme) -> PackedWeight:
    """Store a matrix with every value rounded to the nearest that its group's scale allows.

    Matrices may be stacked, those of experts for example.
    """
    if scheme.format not in QUANTIZED:
        return pack(matrix, scheme.format)
    grouped = group_rows(matrix.astype(np.float32), scheme)
    return pack_groups(grouped, grid_of(grouped, scheme), scheme, matrix.shape[-2])


def group_rows(
    matrix: Float[AnyArray, "*stack K N"], scheme: Scheme
) -> Float[AnyArray, "*stack G R N"]:
    """Cut the rows into groups; a last one that is not full gets copies of its last row."""
    size = scheme.group or matrix.shape[-2]
    missing = -matrix.shape[-2] % size
    if missing:
        xp = matrix.__array_namespace__()
        matrix = xp.concat([matrix, xp.repeat(matrix[..., -1:, :], missing, axis=-2)], axis=-2)
    return rearrange(matrix, "... (g r) n -> ... g r n", r=size)


class Grid(NamedTuple):
    """The values that a group of rows may take: `code * scale`, plus the minimum if there is one.

    It is a pytree of arrays that broadcast against codes: float32, with values that the scheme's
    `scale_dtype` has.
    """

    scales: Float[AnyArray, "*groups"]
    minimums: Float[AnyArray, "*groups"] | None


def grid_of(
    grouped: Float[AnyArray, "*groups R N"], scheme: Scheme, shrink: float | AnyArray = 1.0
) -> Grid:
    """Return the grid, per group and column, that just holds the values times `shrink`.

    With a minimum, the codes 0 to 15 go from the smallest value to the largest. Without one, int8
    and float8 put the largest magnitude on their largest code, and int4 on -8, its only extreme.

    In float16 the minimum is rounded down, so that no value is below it, and the scale, which goes
    from there, to nearest. Next to zero these are 2^-24 apart: the largest value may lie up to 15
    times half of that beyond the grid. Where less than that half is left for the scale, it is zero,
    all codes mean the minimum, and this is rounded to nearest, too.

    A scale below 2^-126 is zero, and so are the codes. Where a value, the range from the smallest
    to the largest, or what `scale_dtype` makes of scale and minimum is not finite, the scale is
    NaN.
    """
    xp = grouped.__array_namespace__()
    half = scheme.scale_dtype == "float16"
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        low, high = xp.min(grouped, axis=-2) * shrink, xp.max(grouped, axis=-2) * shrink
        lowest = low
        if scheme.minimum:
            low = _to_half(low, xp.floor) if half else low
            scales = (high - low) / np.float32(_INT4_STEPS)
        elif scheme.format == "int4":
            scales = xp.where(high > -low, high, low) / np.float32(-8.0)
        else:
            scales = xp.maximum(high, -low) / np.float32(_LARGEST[scheme.format])
        if half:
            scales = _to_half(scales, xp.round)
            low = xp.where(scales == 0, _to_half(lowest, xp.round), low)
    scales = xp.where(xp.abs(scales) < _SMALLEST_SCALE, np.float32(0), scales)
    # XLA's largest of some numbers on a CPU leaves out a NaN among them.
    finite = xp.all(xp.isfinite(grouped), axis=-2) & xp.isfinite(scales)
    return Grid(xp.where(finite, scales, np.float32(np.nan)), low if scheme.minimum else None)


def _to_half(
    values: Float[AnyArray, "..."], rounded: Callable[[AnyArray], AnyArray]
) -> Float[AnyArray, "..."]:
    """Return float32 numbers that float16 has, subnormal ones included; NaN beyond its largest.

    `rounded` takes a quotient to a whole number. A conversion there and back is no way to round:
    XLA may leave both out, and its `reduce_precision` takes subnormal halves for zero.
    """
    xp = values.__array_namespace__()
    # NumPy knows subnormal float32 numbers, XLA on a CPU does not; either way none is left.
    values = xp.where(xp.abs(values) < _LEAST_HALF / 2, np.float32(0), values)
    power = (values.view(np.int32) & _EXPONENT_BITS).view(np.float32)
    step = xp.maximum(power, np.float32(_HALF.tiny)) * np.float32(_HALF.eps)
    halves = rounded(values / step) * step
    return xp.where(xp.abs(halves) <= np.float32(_HALF.max), halves, np.float32(np.nan))


def encode(
    values: Float[AnyArray, "..."], grid: Grid, scheme: Scheme
) -> tuple[Num[AnyArray, "..."], Bool[AnyArray, "..."]]:
    """Return the codes nearest to values, and which values lie within the grid.

    `grid` broadcasts against the values.
    """
    xp = values.__array_namespace__()
    inverse = _inverse(grid.scales)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        from_zero = values if grid.minimums is None else values - grid.minimums
        scaled = xp.where(inverse == 0, np.float32(0), from_zero * inverse)
    if scheme.format == "float8":
        limit = np.float32(_LARGEST["float8"])
        clipped = xp.clip(scaled, -limit, limit)
        return clipped.astype(VALUE_DTYPES["float8"]), xp.abs(scaled) <= limit
    nearest = xp.round(scaled)
    low, high = (0, 15) if scheme.minimum else (-8, 7) if scheme.format == "int4" else (-127, 127)
    codes = xp.clip(nearest, low, high)
    return codes.astype(np.int8), codes == nearest


def decode(codes: Num[AnyArray, "..."], grid: Grid) -> Float[AnyArray, "..."]:
    """Return the values that codes stand for."""
    values = codes.astype(np.float32) * grid.scales
    return values if grid.minimums is None else values + grid.minimums


def pack_groups(
    grouped: Float[AnyArray, "*stack G R N"], grid: Grid, scheme: Scheme, num_rows: int
) -> PackedWeight:
    """Store the first `num_rows` rows as the nearest values of their groups' grids."""
    codes = encode(grouped, per_row(grid), scheme)[0]
    rows = rearrange(codes, "... g r n -> ... (g r) n")[..., :num_rows, :]
    return store(rows, grid, scheme)


def store(codes: Num[AnyArray, "*stack K N"], grid: Grid, scheme: Scheme) -> PackedWeight:
    """Pack codes with the grids `[*stack, G, N]` they belong to, in the scheme's scale dtype."""
    scales, minimums = jax.tree.map(lambda array: array.astype(scheme.scale_dtype), grid)
    return pack_codes(codes, scales, minimums, format=scheme.format, group=scheme.group)


def per_row(grid: Grid) -> Grid:
    """Return a grid of groups `[..., N]` as one that broadcasts over rows, `[..., 1, N]`."""
    scales, minimums = grid
    return Grid(scales[..., None, :], None if minimums is None else minimums[..., None, :])


def _inverse(scales: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """Return one over the scale, and zero where no code but zero has a meaning: 0 and NaN."""
    xp = scales.__array_namespace__()
    usable = xp.abs(scales) >= _SMALLEST_SCALE
    return xp.where(usable, 1 / xp.where(usable, scales, np.float32(1)), np.float32(0))
