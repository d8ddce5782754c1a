"""Codes with a zero and a scale for every group of inputs: what AWQ and GPTQ checkpoints store.

A value is `(code - zero) * scale`, where the zero is a whole number. That product is exact in
float32 for scales of 16 bits, and so are `code * scale`, `zero * scale` and their difference: the
form with a minimum, which is what products read, has the same value to the last bit.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from inferjax.checkpoint.stored_codes import CodeLayout, StoredCodes
from inferjax.models.quantization_config import StoredFormat
from pallas_kernels.quant_matmul.packed import MAX_GROUP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCodes:
    """Some rows of a linear weight: `groups` says which group each input belongs to."""

    codes: UInt8[np.ndarray, "rows in"]
    zeros: UInt8[np.ndarray, "rows groups"]
    scales: Float[np.ndarray, "rows groups"]
    groups: Int[np.ndarray, " in"]

    def values(self) -> Float32[np.ndarray, "rows in"]:
        """Return the weights, as the definition has them."""
        zeros, scales = self.zeros[:, self.groups], self.scales.astype(np.float32)
        steps = self.codes.astype(np.int16) - zeros.astype(np.int16)
        with np.errstate(all="ignore"):
            return steps.astype(np.float32) * scales[:, self.groups]

    def stored(self, layout: CodeLayout) -> StoredCodes:
        """Return the same weights in a layout of `code_layout`."""
        groups, codes = self.groups, self.codes
        if layout.order is not None:
            order = np.frombuffer(layout.order, np.int32)
            groups, codes = groups[order], codes[:, order]
        scales, minimums = self.scales.astype(layout.scale_dtype, copy=False), None
        if layout.minimum:
            # What is taken off the codes, the minimum makes up for: eight bits become signed.
            shift = np.uint8(0 if layout.format == "int4" else 128)
            minimums = (np.int16(shift) - self.zeros).astype(np.float32) * scales
        elif self.zeros.size and (self.zeros == self.zeros[0, 0]).all():
            shift = self.zeros[0, 0]
        else:
            shift = self.zeros[:, groups]
        first = groups[:: layout.group or max(len(groups), 1)]
        return StoredCodes(
            layout=layout,
            codes=(codes - shift).view(np.int8),  # differences wrap around to their sign
            scales=scales[:, first],
            minimums=None if minimums is None else minimums[:, first],
        )


def code_layout(
    stored: StoredFormat, groups: Int[np.ndarray, " in"], scale_dtype: str
) -> CodeLayout | None:
    """Return the smallest layout that holds a layer's values exactly; None if there is none.

    Inputs are sorted by their groups where these are out of order.

    Codes of two and three bits take four. Scales of 32 bits leave no room for an exact minimum:
    codes less their zeros are stored in eight bits instead, where they fit.
    """
    group = 0 if not 0 < stored.group < len(groups) else math.gcd(stored.group, MAX_GROUP)
    if group % 8:
        return None
    small = stored.bits <= 4
    bits, order = "int4" if small else "int8", _order(groups)
    if stored.symmetric:
        narrow = "float16" if scale_dtype == "float16" else "float32"
        return CodeLayout(format=bits, group=group, scale_dtype=narrow, order=order)
    if scale_dtype != "float32":
        return CodeLayout(format=bits, group=group, minimum=True, order=order)
    return CodeLayout(format="int8", group=group, order=order) if small else None


def _order(groups: Int[np.ndarray, " in"]) -> bytes | None:
    if (np.diff(groups) >= 0).all():
        return None
    return np.argsort(groups, kind="stable").astype(np.int32).tobytes()
