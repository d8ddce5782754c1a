"""Dequantizes GGUF tensor types: blocks of bytes in, float32 out, bit for bit as ggml defines them.

A quantized tensor is a run of blocks of 32 or 256 elements; each block holds packed integers `q`
and one or more scales, float16 but for MXFP4's power of two. Every formula is float32 arithmetic in
the order scale * q - offset, so that results equal the reference's exactly.

Source: ggml's block layouts (ggml-common.h), as the `gguf` package decodes them.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import Float16, Float32, Shaped, UInt8

Blocks = UInt8[np.ndarray, "N bytes"]
Values = Float32[np.ndarray, "N block"]

_FLOAT32 = np.dtype(np.float32)
# What the nibbles of IQ4_NL and IQ4_XS stand for, and those of MXFP4, times two.
_UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """How one GGUF tensor type stores elements: `block_len` of them in every `block_bytes` bytes.

    `dtype` is what comes out. A plain type stores just that; a quantized one has `unpack`, which
    writes the float32 values of N blocks into its second argument.
    """

    name: str
    block_len: int
    block_bytes: int
    dtype: np.dtype = _FLOAT32
    unpack: Callable[[Blocks, Values], None] | None = None


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
    step = 2**18 // kind.block_len
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            kind.unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _unpack_q4_0(blocks: Blocks, out: Values) -> None:
    q = _nibbles(blocks[:, 2:18])
    q -= np.uint8(8)
    out[...] = q.view(np.int8)
    out *= _half(blocks, 0)


def _unpack_q4_1(blocks: Blocks, out: Values) -> None:
    out[...] = _nibbles(blocks[:, 4:20])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _unpack_q5_0(blocks: Blocks, out: Values) -> None:
    q = _nibbles(blocks[:, 6:22])
    q |= _fifth_bits(blocks[:, 2:6])
    q -= np.uint8(16)
    out[...] = q.view(np.int8)
    out *= _half(blocks, 0)


def _unpack_q5_1(blocks: Blocks, out: Values) -> None:
    q = _nibbles(blocks[:, 8:24])
    q |= _fifth_bits(blocks[:, 4:8])
    out[...] = q
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _unpack_q8_0(blocks: Blocks, out: Values) -> None:
    out[...] = blocks[:, 2:34].view(np.int8)
    out *= _half(blocks, 0)


def _unpack_q2_k(blocks: Blocks, out: Values) -> None:
    """Write 16 runs of 16 two-bit values.

    Bytes 0-15 hold a scale in the low and an offset in the high nibble, 16-79 the values, 80-83 the
    float16 factors of scales and offsets.
    """
    out[...] = _pairs(blocks[:, 16:80])
    runs = out.reshape(-1, 16, 16)
    runs *= ((blocks[:, :16] & np.uint8(15)) * _half(blocks, 80))[:, :, None]
    runs -= ((blocks[:, :16] >> np.uint8(4)) * _half(blocks, 82))[:, :, None]


def _unpack_q3_k(blocks: Blocks, out: Values) -> None:
    """Write 16 runs of 16 three-bit values.

    Bytes 0-31 hold the top bits, 32-95 the low pairs, 96-107 the six-bit scales (low nibbles of 0-7
    and 8-15 in eight bytes, then the top pairs in four), 108-109 their factor.
    """
    q = _pairs(blocks[:, 32:96]).reshape(-1, 8, 32)
    top = blocks[:, :32]
    for group in range(8):
        q[:, group] |= ((top >> np.uint8(group)) & np.uint8(1)) << np.uint8(2)
    q -= np.uint8(4)
    out[...] = q.view(np.int8).reshape(out.shape)
    scales = _nibbles_k(blocks[:, 96:104], run=8).reshape(-1, 4, 4)
    for group in range(4):
        pair = (blocks[:, 104:108] >> np.uint8(2 * group)) & np.uint8(3)
        scales[:, group] |= pair << np.uint8(4)
    scales -= np.uint8(32)
    runs = out.reshape(-1, 16, 16)
    runs *= (scales.view(np.int8).reshape(-1, 16) * _half(blocks, 108))[:, :, None]


def _unpack_q4_k(blocks: Blocks, out: Values) -> None:
    out[...] = _nibbles_k(blocks[:, 16:144], run=32).reshape(out.shape)
    _scale_k(blocks, out)


def _unpack_q5_k(blocks: Blocks, out: Values) -> None:
    q = _nibbles_k(blocks[:, 48:176], run=32)
    high = blocks[:, 16:48]
    for group in range(8):
        q[:, group] |= ((high >> np.uint8(group)) & np.uint8(1)) << np.uint8(4)
    out[...] = q.reshape(out.shape)
    _scale_k(blocks, out)


def _unpack_q6_k(blocks: Blocks, out: Values) -> None:
    """Write 16 runs of 16 six-bit values.

    Bytes 0-127 hold low nibbles, 128-191 high pairs, 192-207 int8 scales, 208-209 their factor.
    """
    q = _nibbles_k(blocks[:, :128], run=64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for pair in range(4):
        q[:, :, pair] |= ((high >> np.uint8(2 * pair)) & np.uint8(3)) << np.uint8(4)
    q -= np.uint8(32)
    out[...] = q.view(np.int8).reshape(out.shape)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    runs = out.reshape(-1, 16, 16)
    runs *= scales[:, :, None]


def _unpack_iq4_nl(blocks: Blocks, out: Values) -> None:
    out[...] = _UNEVEN[_nibbles(blocks[:, 2:18])]
    out *= _half(blocks, 0)


def _unpack_iq4_xs(blocks: Blocks, out: Values) -> None:
    """Write 8 runs of 32 values of the uneven table.

    Bytes 0-1 hold the factor of the scales, 2-3 the top pairs of the eight six-bit scales, 4-7
    their low nibbles, two a byte, 8-135 the values.
    """
    out[...] = _UNEVEN[_nibbles_k(blocks[:, 8:136], run=16)].reshape(out.shape)
    scales = _nibbles_k(blocks[:, 4:8], run=1).reshape(-1, 8)
    top = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    pairs = (top >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales |= pairs << np.uint8(4)
    scales -= np.uint8(32)
    runs = out.reshape(-1, 8, 32)
    runs *= (scales.view(np.int8) * _half(blocks, 0))[:, :, None]


def _unpack_mxfp4(blocks: Blocks, out: Values) -> None:
    """Write 32 four-bit floats, whose table is doubled: byte 0 is twice their scale's exponent.

    Exponents 0 and 1 make halved scales that are subnormal.
    """
    exponent = blocks[:, :1].astype(np.uint32)
    normal = (exponent - np.uint32(1)) << np.uint32(23)
    subnormal = np.uint32(0x00200000) << (exponent & np.uint32(1))
    out[...] = _E2M1_DOUBLED[_nibbles(blocks[:, 1:17])]
    out *= np.where(exponent < 2, subnormal, normal).view(np.float32)


def _half(blocks: Blocks, at: int) -> Float32[np.ndarray, "N 1"]:
    """Return the float16 at byte `at` of every block, as float32."""
    half: Float16[np.ndarray, "N 1"] = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return half.astype(np.float32)


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


def _scale_k(blocks: Blocks, out: Values) -> None:
    """Apply the eight 6-bit scales and offsets of a Q4_K or Q5_K block in place.

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
    groups = out.reshape(-1, 8, 32)
    groups *= (scales * _half(blocks, 0))[:, :, None]
    groups -= (offsets * _half(blocks, 2))[:, :, None]


# GGUF's number of each tensor type that can be read.
BLOCKS: dict[int, BlockType] = {
    0: BlockType("float32", 1, 4),
    1: BlockType("float16", 1, 2, dtype=np.dtype(np.float16)),
    2: BlockType("q4_0", 32, 18, unpack=_unpack_q4_0),
    3: BlockType("q4_1", 32, 20, unpack=_unpack_q4_1),
    6: BlockType("q5_0", 32, 22, unpack=_unpack_q5_0),
    7: BlockType("q5_1", 32, 24, unpack=_unpack_q5_1),
    8: BlockType("q8_0", 32, 34, unpack=_unpack_q8_0),
    10: BlockType("q2_k", 256, 84, unpack=_unpack_q2_k),
    11: BlockType("q3_k", 256, 110, unpack=_unpack_q3_k),
    12: BlockType("q4_k", 256, 144, unpack=_unpack_q4_k),
    13: BlockType("q5_k", 256, 176, unpack=_unpack_q5_k),
    14: BlockType("q6_k", 256, 210, unpack=_unpack_q6_k),
    20: BlockType("iq4_nl", 32, 18, unpack=_unpack_iq4_nl),
    23: BlockType("iq4_xs", 256, 136, unpack=_unpack_iq4_xs),
    30: BlockType("bfloat16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
    39: BlockType("mxfp4", 32, 17, unpack=_unpack_mxfp4),
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
