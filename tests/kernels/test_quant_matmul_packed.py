"""Packing of weights: what goes in comes out, for NumPy and JAX arrays alike."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quant_matmul import dequantize, pack, pack_codes, take_rows, unpack
from pallas_kernels.quant_matmul.cases import CASES, Case, make_weight, quantize, round_to_codes
from pallas_kernels.quant_matmul.packed import QUANTIZED, VALUE_DTYPES

STORED = [case for case in CASES if case.format in QUANTIZED]


def plain_dequantize(case: Case) -> np.ndarray:
    """Return codes times scales plus minimums without any packing."""
    codes, scales, minimums = round_to_codes(make_weight(case), case)
    index = np.arange(case.num_in) // (case.group or max(case.num_in, 1))
    values = codes.astype(np.float32) * scales[index].astype(np.float32)
    return values if minimums is None else values + minimums[index].astype(np.float32)


@pytest.mark.parametrize("case", STORED, ids=lambda c: c.name)
def test_pack_codes_keeps_every_code(case):
    codes, _, _ = round_to_codes(make_weight(case), case)
    got = unpack(quantize(make_weight(case), case))
    np.testing.assert_array_equal(got.astype(np.float32), codes.astype(np.float32))


@pytest.mark.parametrize("case", STORED, ids=lambda c: c.name)
def test_dequantize_is_code_times_scale_plus_minimum(case):
    packed = quantize(make_weight(case), case)
    np.testing.assert_array_equal(dequantize(packed), plain_dequantize(case))
    on_device = dequantize(jax.tree.map(jnp.asarray, packed))
    np.testing.assert_allclose(np.asarray(on_device), plain_dequantize(case), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_pack_rounds_to_the_format(format):
    weight = make_weight(Case(name="", num_in=37, num_out=21, format=format))
    want = weight.astype(VALUE_DTYPES[format]).astype(np.float32)
    np.testing.assert_array_equal(dequantize(pack(weight, format)), want)
    np.testing.assert_array_equal(np.asarray(dequantize(pack(jnp.asarray(weight), format))), want)


def test_pack_interleaves_sixteen_columns():
    codes = np.arange(8 * 32).reshape(8, 32) % 16
    packed = pack_codes(codes - 8, np.ones((1, 32), np.float32), format="int4")
    assert packed.values.shape == (2, 1, 16, 4)
    # Column 16 + 3, k = 2 in the low nibble and k = 6 in the high one.
    assert packed.values[1, 0, 3, 2] == codes[2, 19] | codes[6, 19] << 4
    wide = pack(np.arange(6 * 20, dtype=np.float32).reshape(6, 20), "bfloat16")
    assert wide.values.shape == (2, 3, 16, 2)
    assert wide.values[0, 2, 5, 1] == np.float32(5 * 20 + 5)
    assert wide.values[1, 0, 4, 0] == 0


@pytest.mark.parametrize("case", STORED[:8], ids=lambda c: c.name)
def test_leading_axes_are_kept(case):
    weights = [make_weight(case, seed) for seed in range(3)]
    parts = [round_to_codes(weight, case) for weight in weights]
    codes, scales, minimums = (
        None if column[0] is None else np.stack(column) for column in zip(*parts, strict=True)
    )
    packed = pack_codes(codes, scales, minimums, format=case.format, group=case.group)
    want = np.stack([dequantize(quantize(weight, case)) for weight in weights])
    np.testing.assert_array_equal(dequantize(packed), want)


@pytest.mark.parametrize("case", CASES[:-2], ids=lambda c: c.name)
def test_take_rows_reads_columns_of_the_packed_transpose(case):
    packed = jax.tree.map(jnp.asarray, quantize(make_weight(case), case))
    ids = jnp.asarray([[0, case.num_out - 1], [case.num_out // 2, 10_000]], jnp.int32)
    want = np.asarray(dequantize(packed)).T[np.minimum(np.asarray(ids), case.num_out - 1)]
    np.testing.assert_array_equal(np.asarray(take_rows(packed, ids)), want)


def test_packed_weight_is_a_pytree_with_static_facts():
    case = CASES[0]
    packed = quantize(make_weight(case), case)
    assert len(jax.tree.leaves(packed)) == 1
    twice = jax.jit(lambda w: dataclasses.replace(w, values=w.values * 2))(packed)
    assert (twice.format, twice.num_in, twice.num_out) == ("float32", 64, 48)


def test_pack_refuses_what_it_cannot_store():
    ones = np.ones((64, 16), np.float32)
    with pytest.raises(ValueError, match="not 'int8'"):
        pack(ones, "int8")
    with pytest.raises(ValueError, match="not 'float32'"):
        pack_codes(ones, ones[:1], format="float32")
    with pytest.raises(ValueError, match="up to 256, not 20"):
        pack_codes(ones, ones[:1], format="int8", group=20)
    with pytest.raises(ValueError, match=r"scales have shape \(1, 16\).*need \(2, 16\)"):
        pack_codes(ones, ones[:1], format="int8", group=32)


def test_half_scales_stay_half_where_all_are():
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    codes, ones = np.ones((64, 16), np.int8), np.ones((2, 16), half)
    packed = pack_codes(codes, ones, ones, format="int8", group=32)
    assert {a.dtype for a in (packed.scales, packed.minimums) if a is not None} == {half}
    mixed = pack_codes(codes, ones, ones.astype(single), format="int8", group=32)
    assert {a.dtype for a in (mixed.scales, mixed.minimums) if a is not None} == {single}


def test_float8_is_the_finite_kind():
    codes = np.asarray([[448.0], [-0.001953125]], np.float32).astype(ml_dtypes.float8_e4m3fn)
    packed = pack_codes(codes, np.ones((1, 1), np.float32), format="float8")
    np.testing.assert_array_equal(dequantize(packed), [[448.0], [-0.001953125]])
