"""Integers of two to eight bits in 32-bit words, as GPTQ and AWQ checkpoints hold them.

GPTQ packs along the inputs: `qweight` [in * bits / 32, out]; its zeros, and all of AWQ's tensors,
are packed along the outputs. The first value has a word's lowest bits, and a value of three bits
may begin in one word and end in the next. AWQ deals eight outputs to a word in another order.

Source: `QuantLinear.pack` in AutoGPTQ and GPTQModel, `WQLinear_GEMM.from_linear` in AutoAWQ.
"""

import numpy as np
from einops import rearrange
from jaxtyping import Int32, UInt8

WORD_BITS = 32
# Which of a word's eight fields an output has: fields hold the outputs 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_words(
    words: Int32[np.ndarray, "rows words"], bits: int
) -> UInt8[np.ndarray, "rows values"]:
    """Return the values of each row of words, the lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        wide = raw.astype(np.uint16)  # two bytes side by side for each
        return ((wide | wide << np.uint16(4)) & np.uint16(0x0F0F)).view(np.uint8)
    flags = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]


def unpack_gptq_codes(
    words: Int32[np.ndarray, "words out"], bits: int
) -> UInt8[np.ndarray, "out in"]:
    """Return GPTQ's codes as Hugging Face lays out a linear weight."""
    return unpack_words(words.T, bits)


def unpack_gptq_zeros(
    words: Int32[np.ndarray, "groups words"], bits: int, *, offset: int, borrows: bool
) -> UInt8[np.ndarray, "out groups"]:
    """Return GPTQ's zeros, to which `offset` is added again.

    Where it was subtracted from whole words, a zero of 0 borrowed from its neighbour; it is given
    back in the same way. Otherwise each value wraps around by itself.
    """
    if borrows and WORD_BITS % bits == 0:
        ones = sum(offset << at for at in range(0, WORD_BITS, bits))
        return unpack_words((words.view(np.uint32) + np.uint32(ones)).view(np.int32), bits).T
    mask = np.uint8((1 << bits) - 1)
    return (unpack_words(words, bits).T + np.uint8(offset)) & mask


def unpack_awq(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "out rows"]:
    """Return AWQ's codes or zeros of four bits, outputs first."""
    fields = rearrange(unpack_words(words, 4), "rows (words field) -> words field rows", field=8)
    return fields[:, _AWQ_FIELDS].reshape(-1, len(words))
