"""Named weights that tests, benchmarks and tuners run, and the plain rounding that makes them."""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.quant_matmul.packed import (
    QUANTIZED,
    VALUE_DTYPES,
    PackedWeight,
    pack,
    pack_codes,
)

LARGEST_CODE = {"int8": 127.0, "int4": 7.0, "float8": 448.0}
SMALLEST_SCALE = 1e-7  # float16 has no smaller ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One matrix: its size and how it is stored."""

    name: str
    num_in: int
    num_out: int
    format: str
    group: int = 0
    has_minimums: bool = False
    scale_dtype: str = "float32"


def _shapes(name: str, **how: Any) -> tuple[Case, ...]:
    """Return a format in even and odd sizes; the last is longer than one chain of 256 terms."""
    sizes = {"": (64, 48), ", odd": (37, 21), ", long": (300, 70)}
    return tuple(
        Case(name=name + size, num_in=num_in, num_out=num_out, **how)
        for size, (num_in, num_out) in sizes.items()
    )


CASES = (
    *_shapes("float32", format="float32"),
    *_shapes("bfloat16", format="bfloat16"),
    *_shapes("float16", format="float16"),
    *_shapes("int8 per channel", format="int8"),
    *_shapes("int8 in groups of 32", format="int8", group=32),
    *_shapes("int8 in groups of 16", format="int8", group=16),
    *_shapes("int8 with minimums", format="int8", group=128, has_minimums=True),
    *_shapes("int8 with half scales", format="int8", group=32, scale_dtype="float16"),
    *_shapes(
        "int8 with half minimums",
        format="int8",
        group=32,
        has_minimums=True,
        scale_dtype="float16",
    ),
    *_shapes("int4 in groups of 32", format="int4", group=32),
    *_shapes("int4 with minimums", format="int4", group=32, has_minimums=True),
    *_shapes("int4 with half scales", format="int4", group=32, scale_dtype="float16"),
    *_shapes(
        "int4 with half minimums",
        format="int4",
        group=32,
        has_minimums=True,
        scale_dtype="float16",
    ),
    *_shapes("int4 in groups of 16", format="int4", group=16, has_minimums=True),
    *_shapes("int4 in groups of 64", format="int4", group=64),
    *_shapes("int4 in groups of 128", format="int4", group=128),
    *_shapes("float8 per channel", format="float8"),
    *_shapes("float8 in groups of 128", format="float8", group=128),
    Case(name="one value", num_in=1, num_out=1, format="int4", group=32),
    Case(name="no columns", num_in=8, num_out=0, format="int8"),
    Case(name="no rows", num_in=0, num_out=5, format="float32"),
)


def quantize(weight: np.ndarray, case: Case) -> PackedWeight:
    """Round a float32 matrix to the nearest values that a case can store, and pack it."""
    if case.format not in QUANTIZED:
        return pack(weight, case.format)
    codes, scales, minimums = round_to_codes(weight, case)
    return pack_codes(codes, scales, minimums, format=case.format, group=case.group)


def round_to_codes(
    weight: np.ndarray, case: Case
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return codes `[K, N]`, scales and minimums `[G, N]`, rounding to nearest."""
    num_in, num_out = weight.shape
    group = case.group or max(num_in, 1)
    groups = -(-num_in // group) if case.group else 1
    padded = np.zeros((groups * group, num_out), np.float32)
    padded[:num_in] = weight
    parts = padded.reshape(groups, group, num_out)
    codes, scales, minimums = _round_groups(parts, case)
    codes = codes.reshape(groups * group, num_out)[:num_in]
    if case.format == "float8":
        return codes.astype(VALUE_DTYPES["float8"]), scales, minimums
    return codes.astype(np.int8), scales, minimums


def _round_groups(
    parts: np.ndarray, case: Case
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Round `[G, group, N]`: codes of the same shape, and `[G, N]` scales and minimums."""
    if case.has_minimums:
        low, high = parts.min(1), parts.max(1)
        levels, first = (15.0, 0.0) if case.format == "int4" else (255.0, -128.0)
        scales = np.maximum((high - low) / levels, SMALLEST_SCALE).astype(case.scale_dtype)
        minimums = (low - first * scales.astype(np.float32)).astype(case.scale_dtype)
        codes = np.rint((parts - minimums[:, None]) / scales[:, None].astype(np.float32))
        return codes.clip(first, first + levels), scales, minimums
    largest = LARGEST_CODE[case.format]
    scales = np.maximum(np.abs(parts).max(1) / largest, SMALLEST_SCALE).astype(case.scale_dtype)
    codes = parts / scales[:, None].astype(np.float32)
    return codes if case.format == "float8" else np.rint(codes), scales, None


def make_weight(case: Case, seed: int = 0) -> np.ndarray:
    """Return a random float32 matrix of the case's size."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((case.num_in, case.num_out)).astype(np.float32)
