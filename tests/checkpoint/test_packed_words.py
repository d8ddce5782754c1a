"""Fields of words: what a slow packer writes is read back, whatever the bits and the order."""

import numpy as np
import pytest
from make_quantized import Recipe, pack_awq, pack_rows, pack_zeros
from numpy.testing import assert_array_equal

from inferjax.checkpoint.packed_words import (
    unpack_awq,
    unpack_gptq_codes,
    unpack_gptq_zeros,
    unpack_words,
)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fields_are_read_from_the_lowest_bits_on(rng, bits):
    values = rng.integers(0, 1 << bits, (5, 96))
    words = pack_rows(values, bits)
    assert words.dtype == np.int32
    assert_array_equal(unpack_words(words, bits), values)
    assert_array_equal(unpack_gptq_codes(words.T, bits), values)
    # A few outputs of a whole tensor, as they are read.
    assert_array_equal(unpack_gptq_codes(words.T[:, 1:3], bits), values[1:3])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_zeros_wrap_around_one_by_one(rng, bits, version):
    zeros = rng.integers(0, 1 << bits, (3, 64))
    zeros[0, :4] = 0
    words = pack_zeros(zeros, Recipe(bits=bits, version=version))
    found = unpack_gptq_zeros(words, bits, offset=2 - version, borrows=False)
    assert_array_equal(found, zeros.T)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_that_borrowed_from_their_neighbours_give_back(rng, bits):
    zeros = rng.integers(0, 1 << bits, (3, 64))
    zeros[:, :8] = 0
    words = pack_zeros(zeros, Recipe(bits=bits, whole_words=True))
    assert_array_equal(unpack_gptq_zeros(words, bits, offset=1, borrows=True), zeros.T)
    assert (unpack_gptq_zeros(words, bits, offset=1, borrows=False) != zeros.T).any()


def test_awq_deals_outputs_in_its_own_order(rng):
    values = rng.integers(0, 16, (5, 24))
    assert_array_equal(unpack_awq(pack_awq(values)), values.T)
    # From AutoAWQ's packing: the outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on.
    assert_array_equal(unpack_awq(np.array([[0x75316420]], np.int32))[:, 0], np.arange(8))
