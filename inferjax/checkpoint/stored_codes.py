"""A tensor that a checkpoint stores as integer codes, before it becomes a packed weight.

Codes, scales and minimums are in Hugging Face's layout: rows are outputs, and groups lie along the
last axis, the inputs. So every format with such blocks (GGUF, AWQ, GPTQ) is read alike.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int8

_BITS = {"int4": 4, "int8": 8}
_SCALE_BITS = {"float16": 16, "float32": 32}
_INT4_ZERO = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodeLayout:
    """How a row is stored: `code * scale + minimum`, scale and minimum being those of its group.

    Codes are int8 values, or int4: -8 to 7 without minimums, 0 to 15 with. `group` 0 is the whole
    row. `scale_dtype` is that of scales and minimums. `order` has int32 numbers: code i of a row is
    input `order[i]`, where groups are no runs of inputs; None is their own order. The layout of a
    stack of matrices has their orders one after the other.
    """

    format: Literal["int4", "int8"]
    group: int
    minimum: bool = False
    scale_dtype: Literal["float16", "float32"] = "float32"
    order: bytes | None = None

    @property
    def bits_per_weight(self) -> float:
        """The bits of a value in a long row, its share of scale and minimum included."""
        shared = _SCALE_BITS[self.scale_dtype] * (1 + self.minimum)
        return _BITS[self.format] + (shared / self.group if self.group else 0.0)

    def __str__(self) -> str:
        """Return what people read, such as "int4 in groups of 32 with minimums"."""
        groups = f" in groups of {self.group}" if self.group else ""
        minimums = " with minimums" if self.minimum else ""
        return f"{self.format}{groups}{minimums}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredCodes:
    """Whole rows of a tensor: codes, and each group's scale and minimum."""

    layout: CodeLayout
    codes: Int8[np.ndarray, "rows in"]
    scales: Float[np.ndarray, "rows groups"]
    minimums: Float[np.ndarray, "rows groups"] | None = None

    def values(self) -> Float32[np.ndarray, "rows in"]:
        """Return what the codes stand for, in their order; NaN and infinity give no warning."""
        group, num_in = self.layout.group or max(self.codes.shape[1], 1), self.codes.shape[1]
        out = self.codes.astype(np.float32)
        with np.errstate(all="ignore"):
            out *= _each(self.scales.astype(np.float32), group, num_in)
            if self.minimums is not None:
                out += _each(self.minimums.astype(np.float32), group, num_in)
        return out

    def widened(self, layout: CodeLayout) -> "StoredCodes":
        """Return the same values in a layout that `narrowest` gave for this one and others."""
        codes, scales, minimums = self.codes, self.scales, self.minimums
        dtype = np.dtype(layout.scale_dtype)
        scales = scales.astype(dtype, copy=False)
        if minimums is not None:
            minimums = minimums.astype(dtype, copy=False)
        elif layout.minimum and layout.format == "int4":
            codes, minimums = codes + np.int8(_INT4_ZERO), scales * dtype.type(-_INT4_ZERO)
        elif layout.minimum:
            minimums = np.zeros_like(scales)
        if layout.group != self.layout.group:
            num_groups = -(-codes.shape[1] // layout.group)
            times = self.layout.group // layout.group or num_groups
            scales = _each(scales, times, num_groups)
            minimums = None if minimums is None else _each(minimums, times, num_groups)
        return StoredCodes(layout=layout, codes=codes, scales=scales, minimums=minimums)


def narrowest(layouts: Iterable[CodeLayout]) -> CodeLayout | None:
    """Return the layout with the fewest bits that holds all of them exactly; None if none does."""
    distinct = set(layouts)
    if len(distinct) == 1:
        return distinct.pop()
    group = math.gcd(*(layout.group for layout in distinct))
    if group % 8:
        return None
    minimum = any(layout.minimum for layout in distinct)
    format = "int8" if any(layout.format == "int8" for layout in distinct) else "int4"
    # Symmetric int4 codes get a minimum of -8 scales, which float16 might not hold.
    shifted = format == "int4" and minimum and not all(layout.minimum for layout in distinct)
    narrow = all(layout.scale_dtype == "float16" for layout in distinct) and not shifted
    return CodeLayout(
        format=format,
        group=group,
        minimum=minimum,
        scale_dtype="float16" if narrow else "float32",
    )


def _each(
    shared: Float[np.ndarray, "rows groups"], times: int, count: int
) -> Float[np.ndarray, "rows count"]:
    """Repeat what groups share, and cut the last one."""
    return np.repeat(shared, times, axis=1)[:, :count]
