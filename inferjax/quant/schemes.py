"""The ways to store a weight in fewer bits, by name, and rounding to them."""

import dataclasses
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float, Num

from inferjax.errors import UnsupportedConfig
from pallas_kernels.quant_matmul import PackedWeight, pack, pack_codes

AnyArray = Any

_LARGEST = {"int8": 127.0, "float8": 448.0}
_INT4_STEPS = 15.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a matrix is stored: the format of its values, and how many rows share a scale.

    `group` 0 is a scale per column. `minimum` stores the smallest value of a group beside its
    scale, so that codes need not be symmetric. `activations` is what the other factor is rounded
    to on the way into the product.
    """

    format: str
    group: int = 0
    minimum: bool = False
    activations: str = "float32"


SCHEMES: dict[str, Scheme] = {
    "float32": Scheme(format="float32"),
    "bfloat16": Scheme(format="bfloat16"),
    "float16": Scheme(format="float16"),
    "int8": Scheme(format="int8"),
    "int8-g128": Scheme(format="int8", group=128),
    "int8-w8a8": Scheme(format="int8", activations="int8"),
    "int4": Scheme(format="int4", group=32, minimum=True),
    "int4-g64": Scheme(format="int4", group=64),
    "int4-g128": Scheme(format="int4", group=128),
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


def round_to_nearest(matrix: Float[AnyArray, "K N"], scheme: Scheme) -> PackedWeight:
    """Store a matrix with every value rounded to the nearest that its group's scale allows."""
    if scheme.format in ("float32", "bfloat16", "float16"):
        return pack(matrix, scheme.format)
    grouped = _groups(matrix.astype(np.float32), scheme.group)
    codes, scales, minimums = (_asymmetric if scheme.minimum else _symmetric)(grouped, scheme)
    rows = rearrange(codes, "g r n -> (g r) n")[: matrix.shape[0]]
    return pack_codes(rows, scales, minimums, format=scheme.format, group=scheme.group)


def _groups(matrix: Float[AnyArray, "K N"], group: int) -> Float[AnyArray, "G R N"]:
    """Cut the rows into groups; a last one that is not full gets copies of its last row."""
    size = group or matrix.shape[0]
    missing = -matrix.shape[0] % size
    if missing:
        xp = matrix.__array_namespace__()
        matrix = xp.concat([matrix, xp.repeat(matrix[-1:], missing, axis=0)], axis=0)
    return rearrange(matrix, "(g r) n -> g r n", r=size)


def _symmetric(
    grouped: Float[AnyArray, "G R N"], scheme: Scheme
) -> tuple[Num[AnyArray, "G R N"], Float[AnyArray, "G N"], None]:
    """Scale a group so that its largest value is the largest code, or for int4 the code -8."""
    xp = grouped.__array_namespace__()
    if scheme.format == "int4":
        low, high = xp.min(grouped, axis=1), xp.max(grouped, axis=1)
        scales = xp.where(high > -low, high, low) / np.float32(-8.0)
        codes = xp.clip(xp.round(grouped * _inverse(scales)[:, None]), -8, 7)
        return codes.astype(np.int8), scales, None
    scales = xp.max(xp.abs(grouped), axis=1) / np.float32(_LARGEST[scheme.format])
    scaled = grouped * _inverse(scales)[:, None]
    if scheme.format == "float8":
        return scaled, scales, None
    return xp.clip(xp.round(scaled), -127, 127).astype(np.int8), scales, None


def _asymmetric(
    grouped: Float[AnyArray, "G R N"], scheme: Scheme
) -> tuple[Num[AnyArray, "G R N"], Float[AnyArray, "G N"], Float[AnyArray, "G N"]]:
    """Spread the codes 0 to 15 from a group's smallest value to its largest."""
    del scheme
    xp = grouped.__array_namespace__()
    low = xp.min(grouped, axis=1)
    scales = (xp.max(grouped, axis=1) - low) / np.float32(_INT4_STEPS)
    codes = xp.round((grouped - low[:, None]) * _inverse(scales)[:, None])
    return xp.clip(codes, 0, 15).astype(np.int8), scales, low


def _inverse(scales: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """Return one over the scale; zero for a group of equal values, whose codes are all zero."""
    xp = scales.__array_namespace__()
    return xp.where(scales == 0, np.float32(0), 1 / xp.where(scales == 0, np.float32(1), scales))
