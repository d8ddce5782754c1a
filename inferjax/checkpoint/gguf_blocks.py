"""GGUF tensor types: blocks of bytes in, codes or float32 out, bit for bit as ggml defines them.

A quantized tensor is a run of blocks of 32 or 256 elements; each block holds packed integers and
one or more scales, float16 but for MXFP4's power of two. All of them are integer codes of at most
eight bits with a scale, and for some a minimum, for every 16 or 32 of them: that is how they are
unpacked, and float32 follows as code * scale + minimum, which equals the reference's exactly.

Source: ggml's block layouts (ggml-common.h), as the `gguf` package decodes them.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float16, Float32, Int8, Shaped, UInt8

from inferjax.checkpoint.stored_codes import CodeLayout, StoredCodes
from inferjax.errors import CheckpointError

Blocks = UInt8[np.ndarray, "N bytes"]
# Codes, the scale of each run of a block, and its minimum.
Unpacked = tuple[
    Int8[np.ndarray, "N block"],
    Float[np.ndarray, "N runs"],
    Float[np.ndarray, "N runs"] | None,
]

_FLOAT32 = np.dtype(np.float32)
# What the nibbles of IQ4_NL and IQ4_XS stand for, and those of MXFP4, times two.
_UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_STEP_ELEMENTS = 2**18


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """How one GGUF tensor type stores elements: `block_len` of them in every `block_bytes` bytes.

    `dtype` is what comes out. A plain type stores just that; a quantized one has `unpack`, which
    takes N blocks apart, and the `layout` that their codes fit.
    """

    name: str
    block_len: int
    block_bytes: int
    dtype: np.dtype = _FLOAT32
    unpack: Callable[[Blocks], Unpacked] | None = None
    layout: CodeLayout | None = None


def stored_bits(name: str) -> float | None:
    """Return the bits of a value in a file of a quantized type; None for another name."""
    kinds = (kind for kind in BLOCKS.values() if kind.name == name and kind.layout is not None)
    return next((8 * kind.block_bytes / kind.block_len for kind in kinds), None)


def dequantize(
    kind: BlockType, raw: UInt8[np.ndarray, " bytes"]
) -> Shaped[np.ndarray, " elements"]:
    """Return the elements stored in `raw`: a view for plain types, new float32 for quantized ones.

    Works on 256 Ki elements at a time: temporaries stay below 1 MB, in the cache, which measured
    5 to 25 % faster than whole tensors. Non-finite scales give non-finite values without a warning.
    """
    if kind.unpack is None:
        return raw.view(kind.dtype)
    blocks = raw.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_len), np.float32)
    step = _STEP_ELEMENTS // kind.block_len
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            codes, scales, minimums = kind.unpack(blocks[start : start + step])
            runs = out[start : start + step].reshape(*scales.shape, -1)
            runs[...] = codes.reshape(runs.shape)
            runs *= scales.astype(np.float32, copy=False)[:, :, None]
            if minimums is not None:
                runs += minimums.astype(np.float32, copy=False)[:, :, None]
    return out.reshape(-1)


def unpack_rows(kind: BlockType, raw: UInt8[np.ndarray, " bytes"], num_in: int) -> StoredCodes:
    """Return rows of `num_in` elements, which are whole blocks, as codes of `kind.layout`."""
    if kind.unpack is None or kind.layout is None:
        raise CheckpointError(f"{kind.name} stores no codes", fix="read its values")
    with np.errstate(all="ignore"):
        codes, scales, minimums = kind.unpack(raw.reshape(-1, kind.block_bytes))
    rows, groups = codes.size // num_in, num_in // kind.layout.group
    return StoredCodes(
        layout=kind.layout,
        codes=codes.reshape(rows, num_in),
        scales=scales.reshape(rows, groups),
        minimums=None if minimums is None else minimums.reshape(rows, groups),
    )


def _unpack_q4_0(blocks: Blocks) -> Unpacked:
    return _signed(_nibbles(blocks[:, 2:18]), 8), _half(blocks, 0), None


def _unpack_q4_1(blocks: Blocks) -> Unpacked:
    return _nibbles(blocks[:, 4:20]).view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _unpack_q5_0(blocks: Blocks) -> Unpacked:
    q = _nibbles(blocks[:, 6:22])
    q |= _fifth_bits(blocks[:, 2:6])
    return _signed(q, 16), _half(blocks, 0), None


def _unpack_q5_1(blocks: Blocks) -> Unpacked:
    q = _nibbles(blocks[:, 8:24])
    q |= _fifth_bits(blocks[:, 4:8])
    return q.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _unpack_q8_0(blocks: Blocks) -> Unpacked:
    return np.ascontiguousarray(blocks[:, 2:34]).view(np.int8), _half(blocks, 0), None


def _unpack_q2_k(blocks: Blocks) -> Unpacked:
    """Take apart 16 runs of 16 two-bit values.

    Bytes 0-15 hold a scale in the low and an offset in the high nibble, 16-79 the values, 80-83 the
    float16 factors of scales and offsets.
    """
    scales = (blocks[:, :16] & np.uint8(15)) * _single(blocks, 80)
    offsets = (blocks[:, :16] >> np.uint8(4)) * _single(blocks, 82)
    return _pairs(blocks[:, 16:80]).view(np.int8), scales, -offsets


def _unpack_q3_k(blocks: Blocks) -> Unpacked:
    """Take apart 16 runs of 16 three-bit values.

    Bytes 0-31 hold the top bits, 32-95 the low pairs, 96-107 the six-bit scales (low nibbles of 0-7
    and 8-15 in eight bytes, then the top pairs in four), 108-109 their factor.
    """
    q = _pairs(blocks[:, 32:96]).reshape(-1, 8, 32)
    top = blocks[:, :32]
    for group in range(8):
        q[:, group] |= ((top >> np.uint8(group)) & np.uint8(1)) << np.uint8(2)
    scales = _nibbles_k(blocks[:, 96:104], run=8).reshape(-1, 4, 4)
    for group in range(4):
        pair = (blocks[:, 104:108] >> np.uint8(2 * group)) & np.uint8(3)
        scales[:, group] |= pair << np.uint8(4)
    scales = _signed(scales.reshape(-1, 16), 32) * _single(blocks, 108)
    return _signed(q.reshape(-1, 256), 4), scales, None


def _unpack_q4_k(blocks: Blocks) -> Unpacked:
    q = _nibbles_k(blocks[:, 16:144], run=32).reshape(-1, 256)
    return q.view(np.int8), *_scales_k(blocks)


def _unpack_q5_k(blocks: Blocks) -> Unpacked:
    q = _nibbles_k(blocks[:, 48:176], run=32)
    high = blocks[:, 16:48]
    for group in range(8):
        q[:, group] |= ((high >> np.uint8(group)) & np.uint8(1)) << np.uint8(4)
    return q.reshape(-1, 256).view(np.int8), *_scales_k(blocks)


def _unpack_q6_k(blocks: Blocks) -> Unpacked:
    """Take apart 16 runs of 16 six-bit values.

    Bytes 0-127 hold low nibbles, 128-191 high pairs, 192-207 int8 scales, 208-209 their factor.
    """
    q = _nibbles_k(blocks[:, :128], run=64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for pair in range(4):
        q[:, :, pair] |= ((high >> np.uint8(2 * pair)) & np.uint8(3)) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8) * _single(blocks, 208)
    return _signed(q.reshape(-1, 256), 32), scales, None


def _unpack_iq4_nl(blocks: Blocks) -> Unpacked:
    return _UNEVEN[_nibbles(blocks[:, 2:18])], _half(blocks, 0), None


def _unpack_iq4_xs(blocks: Blocks) -> Unpacked:
    """Take apart 8 runs of 32 values of the uneven table.

    Bytes 0-1 hold the factor of the scales, 2-3 the top pairs of the eight six-bit scales, 4-7
    their low nibbles, two a byte, 8-135 the values.
    """
    codes = _UNEVEN[_nibbles_k(blocks[:, 8:136], run=16)].reshape(-1, 256)
    scales = _nibbles_k(blocks[:, 4:8], run=1).reshape(-1, 8)
    top = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    pairs = (top >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales |= pairs << np.uint8(4)
    return codes, _signed(scales, 32) * _single(blocks, 0), None


def _unpack_mxfp4(blocks: Blocks) -> Unpacked:
    """Take apart 32 four-bit floats, whose table is doubled: byte 0 is twice the scale's exponent.

    Exponents 0 and 1 make halved scales that are subnormal.
    """
    exponent = blocks[:, :1].astype(np.uint32)
    normal = (exponent - np.uint32(1)) << np.uint32(23)
    subnormal = np.uint32(0x00200000) << (exponent & np.uint32(1))
    scales = np.where(exponent < 2, subnormal, normal).view(np.float32)
    return _E2M1_DOUBLED[_nibbles(blocks[:, 1:17])], scales, None


def _half(blocks: Blocks, at: int) -> Float16[np.ndarray, "N 1"]:
    """Return the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _single(blocks: Blocks, at: int) -> Float32[np.ndarray, "N 1"]:
    """Return the float16 at byte `at` of every block, as float32."""
    return _half(blocks, at).astype(np.float32)


def _signed(q: UInt8[np.ndarray, "N values"], zero: int) -> Int8[np.ndarray, "N values"]:
    """Return what is stored with `zero` added, overwriting it."""
    q -= np.uint8(zero)
    return q.view(np.int8)


def _nibbles(packed: UInt8[np.ndarray, "N 16"]) -> UInt8[np.ndarray, "N 32"]:
    """Split 16 bytes into the 16 low nibbles followed by the 16 high ones."""
    return _nibbles_k(packed, run=16).reshape(-1, 32)


def _nibbles_k(packed: UInt8[np.ndarray, "N bytes"], run: int) -> UInt8[np.ndarray, "N runs {run}"]:
    """Split every `run` bytes into a run of low nibbles followed by a run of high ones."""
    packed = packed.reshape(len(packed), -1, run)
    halves = np.empty((len(packed), packed.shape[1], 2, run), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=halves[:, :, 0])
    np.right_shift(packed, np.uint8(4), out=halves[:, :, 1])
    return halves.reshape(len(packed), -1, run)


def _pairs(packed: UInt8[np.ndarray, "N 64"]) -> UInt8[np.ndarray, "N 256"]:
    """Split each half's 32 bytes into the runs of their four pairs of bits, lowest first."""
    packed = packed.reshape(-1, 2, 32)
    pairs = np.empty((len(packed), 2, 4, 32), np.uint8)
    for group in range(4):
        np.right_shift(packed, np.uint8(2 * group), out=pairs[:, :, group])
    pairs &= np.uint8(3)
    return pairs.reshape(-1, 256)


def _fifth_bits(packed: UInt8[np.ndarray, "N 4"]) -> UInt8[np.ndarray, "N 32"]:
    """Return bit i of the little-endian 32-bit word as value 0 or 16 at place i."""
    bits = np.unpackbits(np.ascontiguousarray(packed), bitorder="little").reshape(-1, 32)
    bits <<= np.uint8(4)
    return bits


def _scales_k(
    blocks: Blocks,
) -> tuple[Float32[np.ndarray, "N 8"], Float32[np.ndarray, "N 8"]]:
    """Return the eight scales and minimums of a Q4_K or Q5_K block.

    Bytes 0-3 hold the float16 factors of scales and offsets. Bytes 4-15 hold scales 0-3, then
    offsets 0-3, in their low 6 bits, and then the low nibbles of scales and offsets 4-7, whose top
    pairs are in the spare bits of the first two.
    """
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, nibbles = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.empty((len(blocks), 8), np.uint8)
    offsets = np.empty((len(blocks), 8), np.uint8)
    scales[:, :4] = first & np.uint8(0x3F)
    offsets[:, :4] = second & np.uint8(0x3F)
    scales[:, 4:] = (nibbles & np.uint8(0x0F)) | ((first >> np.uint8(2)) & np.uint8(0x30))
    offsets[:, 4:] = (nibbles >> np.uint8(4)) | ((second >> np.uint8(2)) & np.uint8(0x30))
    return scales * _single(blocks, 0), -(offsets * _single(blocks, 2))


def _codes(
    format: Literal["int4", "int8"],
    group: int,
    scale_dtype: Literal["float16", "float32"] = "float32",
    *,
    minimum: bool = False,
) -> CodeLayout:
    return CodeLayout(format=format, group=group, minimum=minimum, scale_dtype=scale_dtype)


# GGUF's number of each tensor type that can be read. Scales that are products are float32: a
# float16 factor times a small integer has more bits than float16.
BLOCKS: dict[int, BlockType] = {
    0: BlockType("float32", 1, 4),
    1: BlockType("float16", 1, 2, np.dtype(np.float16)),
    2: BlockType("q4_0", 32, 18, _FLOAT32, _unpack_q4_0, _codes("int4", 32, "float16")),
    3: BlockType(
        "q4_1", 32, 20, _FLOAT32, _unpack_q4_1, _codes("int4", 32, "float16", minimum=True)
    ),
    6: BlockType("q5_0", 32, 22, _FLOAT32, _unpack_q5_0, _codes("int8", 32, "float16")),
    7: BlockType(
        "q5_1", 32, 24, _FLOAT32, _unpack_q5_1, _codes("int8", 32, "float16", minimum=True)
    ),
    8: BlockType("q8_0", 32, 34, _FLOAT32, _unpack_q8_0, _codes("int8", 32, "float16")),
    10: BlockType("q2_k", 256, 84, _FLOAT32, _unpack_q2_k, _codes("int4", 16, minimum=True)),
    11: BlockType("q3_k", 256, 110, _FLOAT32, _unpack_q3_k, _codes("int4", 16)),
    12: BlockType("q4_k", 256, 144, _FLOAT32, _unpack_q4_k, _codes("int4", 32, minimum=True)),
    13: BlockType("q5_k", 256, 176, _FLOAT32, _unpack_q5_k, _codes("int8", 32, minimum=True)),
    14: BlockType("q6_k", 256, 210, _FLOAT32, _unpack_q6_k, _codes("int8", 16)),
    20: BlockType("iq4_nl", 32, 18, _FLOAT32, _unpack_iq4_nl, _codes("int8", 32, "float16")),
    23: BlockType("iq4_xs", 256, 136, _FLOAT32, _unpack_iq4_xs, _codes("int8", 32)),
    30: BlockType("bfloat16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    39: BlockType("mxfp4", 32, 17, _FLOAT32, _unpack_mxfp4, _codes("int8", 32)),
}

# The types that exist and are not read, so that an error can name them. The numbers 4, 5, 31-33 and
# 36-38 stood for formats that ggml itself has removed.
UNREAD: dict[int, str] = {
    4: "q4_2 (removed from ggml)",
    5: "q4_3 (removed from ggml)",
    9: "q8_1",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    29: "iq1_m",
    31: "q4_0_4_4 (removed from ggml)",
    32: "q4_0_4_8 (removed from ggml)",
    33: "q4_0_8_8 (removed from ggml)",
    34: "tq1_0",
    35: "tq2_0",
    36: "iq4_nl_4_4 (removed from ggml)",
    37: "iq4_nl_4_8 (removed from ggml)",
    38: "iq4_nl_8_8 (removed from ggml)",
    40: "nvfp4",
    41: "q1_0",
}
