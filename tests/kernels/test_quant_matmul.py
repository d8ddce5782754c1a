"""Every implementation of the product with packed weights, and every variant of the native one."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.quant_matmul import (
    ACTIVATIONS,
    IMPLEMENTATIONS,
    cpu,
    dequantize,
    pack,
    pack_codes,
    quant_matmul,
)
from pallas_kernels.quant_matmul.cases import CASES, Case, make_weight, quantize
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels import native_library
from tests.tolerances import QUANT_MATMUL_F32, QUANT_MATMUL_ROUNDED

ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 16, 33)
LONG = [case for case in CASES if case.name.endswith("long")]
PAIRS = [
    (case, activations)
    for case in LONG
    for activations in ACTIVATIONS
    if case.format in ACTIVATIONS[activations]
]


def name_of(item) -> str:
    return item.name if isinstance(item, Case) else str(item)


@functools.cache
def make_packed(case: Case):
    return jax.tree.map(jnp.asarray, quantize(make_weight(case), case))


def make_x(case: Case, rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, case.num_in)).astype(np.float32)


def share_of_magnitude(got, x: np.ndarray, case: Case) -> float:
    """Return the largest error as a share of the sum of the terms' magnitudes, in float64."""
    weight = np.asarray(dequantize(make_packed(case)), np.float64)
    x = np.asarray(x, np.float64)
    error = np.abs(np.asarray(got, np.float64) - x @ weight)
    return float((error / (np.abs(x) @ np.abs(weight) + 1e-30)).max(initial=0.0))


def variants() -> tuple[str, ...]:
    return cpu.VARIANTS if native_library.built() else native.variants()


def run(x, case: Case, activations: str = "float32", **how) -> np.ndarray:
    native_library.require()
    return np.asarray(
        cpu.quant_matmul(jnp.asarray(x), make_packed(case), activations=activations, **how)
    )


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_quant_matmul_equals_float64(case, implementation):
    if implementation == "cpu":
        native_library.require()
    for activations in ACTIVATIONS:
        if case.format not in ACTIVATIONS[activations]:
            continue
        limit = QUANT_MATMUL_F32 if activations == "float32" else QUANT_MATMUL_ROUNDED[activations]
        for rows in (0, 3, 9):
            x = make_x(case, rows)
            got = quant_matmul(
                jnp.asarray(x),
                make_packed(case),
                implementation=implementation,
                activations=activations,
            )
            assert got.shape == (rows, case.num_out)
            assert got.dtype == jnp.float32
            assert share_of_magnitude(got, x, case) <= limit


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(("case", "activations"), PAIRS, ids=name_of)
def test_every_variant_equals_float64_for_any_number_of_rows(case, activations, variant):
    limit = QUANT_MATMUL_F32 if activations == "float32" else QUANT_MATMUL_ROUNDED[activations]
    for rows in ROWS:
        x = make_x(case, rows)
        got = run(x, case, activations, variant=variant)
        assert share_of_magnitude(got, x, case) <= limit


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(("case", "activations"), PAIRS, ids=name_of)
def test_row_has_the_same_bits_whatever_shares_its_call(case, activations, variant):
    x = make_x(case, 270)
    want = run(x, case, activations, variant=variant)
    for begin, rows in [(0, 1), (1, 2), (4, 3), (7, 6), (3, 7), (20, 8), (11, 9), (100, 64)]:
        part = run(x[begin : begin + rows], case, activations, variant=variant)
        np.testing.assert_array_equal(part, want[begin : begin + rows])


@pytest.mark.parametrize("size", [1e-36, 1e-32, 1e-30, 1e20, 2e36])
@pytest.mark.parametrize("variant", native.variants() if native.available() else ())
@pytest.mark.parametrize(("case", "activations"), PAIRS, ids=name_of)
def test_rows_next_to_zero_and_to_infinity_have_the_same_bits_too(case, activations, variant, size):
    """A path that moves a power of two from weights to x must not be one of several."""
    x = make_x(case, 16) * np.float32(size)
    want = run(x, case, activations, variant=variant)
    for rows in (1, 2, 4, 6, 8):
        part = run(x[:rows], case, activations, variant=variant)
        np.testing.assert_array_equal(part, want[:rows])


@pytest.mark.parametrize("variant", native.variants() if native.available() else ())
def test_float8_rows_next_to_infinity_do_not_overflow(variant):
    weight = pack_codes(
        np.full((64, 32), 1.0, ml_dtypes.float8_e4m3fn),
        np.full((1, 32), 1e-3, np.float32),
        format="float8",
    )
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 2e36
    got = cpu.quant_matmul(
        jnp.asarray(x), jax.tree.map(jnp.asarray, weight), activations="float32", variant=variant
    )
    np.testing.assert_allclose(np.asarray(got), 2e33, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 40, 600])
@pytest.mark.parametrize(("case", "activations"), PAIRS[:2] + PAIRS[3:6], ids=name_of)
def test_bits_do_not_depend_on_the_number_of_threads(case, activations, rows):
    wide = dataclasses.replace(case, name="wide", num_in=520, num_out=1000)
    x = make_x(wide, rows)
    want = run(x, wide, activations, max_threads=1)
    for max_threads in (2, 8, 0):
        np.testing.assert_array_equal(run(x, wide, activations, max_threads=max_threads), want)


@pytest.mark.parametrize(("case", "activations"), PAIRS, ids=name_of)
def test_nan_and_infinity_stay_in_their_row(case, activations):
    x = make_x(case, 12)
    clean = run(x, case, activations)
    x[3, 17], x[9, 40] = np.nan, np.inf
    got = run(x, case, activations)
    assert not np.isfinite(got[[3, 9]]).any()
    others = [row for row in range(12) if row not in (3, 9)]
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_nan_in_a_scale_stays_in_its_column(implementation):
    native_library.require()
    case = LONG[4]
    packed = make_packed(case)
    packed = dataclasses.replace(packed, scales=packed.scales.at[1, 2, 3].set(jnp.nan))
    got = quant_matmul(jnp.asarray(make_x(case, 3)), packed, implementation=implementation)
    assert np.isnan(np.asarray(got)[:, 19]).all()
    assert np.isfinite(np.delete(np.asarray(got), 19, axis=1)).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_one_at_a_time_reads_the_weights_exactly(format):
    case = Case(name="", num_in=48, num_out=20, format=format, group=16)
    want = np.asarray(dequantize(make_packed(case)))
    for variant in native.variants():
        for factor in (1.0, -0.75, 2.0**100, 1.99999988):
            got = run(np.eye(48, dtype=np.float32) * np.float32(factor), case, variant=variant)
            np.testing.assert_allclose(got, want * np.float32(factor), rtol=2.5e-7)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("largest", [1e-25, 1.0, 254.0, 255.9, 1e30])
def test_float_activations_are_good_to_23_bits_of_their_largest(largest, variant):
    case = Case(name="", num_in=256, num_out=16, format="int8")
    weight = np.asarray(dequantize(make_packed(case)), np.float64)
    x = make_x(case, 9) * np.float32(largest / 8)
    x[:, 77] = largest
    got = np.asarray(run(x, case, variant=variant), np.float64)
    rounding = np.abs(x).max() * 2.0**-23 * np.abs(weight).sum(0)
    assert (np.abs(got - x.astype(np.float64) @ weight) <= rounding).all()


@pytest.mark.parametrize("variant", variants())
def test_minimums_multiply_the_same_rounded_activations_as_codes(variant):
    """Else what all are rounded by would count as often as codes are large, not as weights are."""
    codes = np.tile(np.asarray([[7], [8]], np.int8), (16, 16))
    codes[7] = 15
    shared = np.full((1, 16), 2 / 15, np.float32), np.full((1, 16), -1.0, np.float32)
    packed = pack_codes(codes, *shared, format="int4", group=32)
    x = np.full((3, 32), 1000.49 * 2.0**-22, np.float32)
    x[:, 7] = 1.0
    got = cpu.quant_matmul(jnp.asarray(x), packed, activations="float32", variant=variant)
    weight = np.asarray(dequantize(packed), np.float64)
    rounding = 2.0**-23 * np.abs(weight).sum(0)
    assert (np.abs(np.asarray(got) - x.astype(np.float64) @ weight) <= rounding).all()


def test_smallest_half_scale_is_read_exactly():
    """Half of the float16 scales below 6e-5 are subnormal, which threads may flush."""
    native_library.require()
    codes = np.asarray([[1, -3, 100]], np.int8)
    scales = np.asarray([[2.0**-24, 3 * 2.0**-20, 65504.0]], np.float16)
    packed = pack_codes(codes, scales, scales, format="int8", group=32)
    for variant in native.variants():
        got = cpu.quant_matmul(jnp.ones((1, 1)), packed, activations="float32", variant=variant)
        np.testing.assert_array_equal(np.asarray(got), (codes + 1.0) * scales.astype(np.float32))


def test_float8_nan_is_a_nan():
    native_library.require()
    case = next(c for c in LONG if c.format == "float8")
    packed = make_packed(case)
    packed = dataclasses.replace(packed, values=packed.values.at[0, 7, 4, 1].set(jnp.nan))
    for variant in native.variants():
        got = cpu.quant_matmul(
            jnp.asarray(make_x(case, 2)), packed, activations="float32", variant=variant
        )
        assert np.isnan(np.asarray(got)[:, 4]).all()
        assert np.isfinite(np.delete(np.asarray(got), 4, axis=1)).all()


@pytest.mark.parametrize("format", ["float16", "float8"])
def test_every_code_of_a_narrow_float_is_decoded_exactly(format):
    native_library.require()
    if format == "float8":
        codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    else:
        codes = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = codes[np.isfinite(codes.astype(np.float32))]
    weight = np.zeros((2, -(-finite.size // 2)), codes.dtype)
    weight.reshape(-1)[: finite.size] = finite
    ones = np.ones((1, weight.shape[1]), np.float32)
    packed = (
        pack(weight, format) if format == "float16" else pack_codes(weight, ones, format=format)
    )
    for variant in native.variants():
        got = cpu.quant_matmul(
            jnp.eye(2, dtype=jnp.float32), packed, activations="float32", variant=variant
        )
        np.testing.assert_array_equal(np.asarray(got), weight.astype(np.float32))


def test_bfloat16_x_is_read_as_it_is():
    case = LONG[3]
    x = jnp.asarray(make_x(case, 5)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(run(x, case), run(x.astype(jnp.float32), case))


def test_buffers_need_no_alignment():
    """A slice of a NumPy buffer that is off by four bytes reaches the kernel as it lies."""
    case = LONG[3]
    memory = np.zeros(5 * case.num_in + 1, np.float32)
    x = memory[1:].reshape(5, case.num_in)
    x[:] = make_x(case, 5)
    np.testing.assert_array_equal(run(x, case), run(x.copy(), case))


def test_two_programs_at_once_do_not_wait_for_each_other():
    native_library.require()
    case = dataclasses.replace(LONG[4], num_in=512, num_out=2048)
    x = jnp.asarray(make_x(case, 4))
    jitted = jax.jit(lambda x, w: quant_matmul(x, w, implementation="cpu"))
    want = np.asarray(jitted(x, make_packed(case)))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(jitted, x, make_packed(case)) for _ in range(120)]
        for future in runs:
            np.testing.assert_array_equal(np.asarray(future.result(timeout=60)), want)


def test_unknown_implementation_is_refused():
    with pytest.raises(KeyError, match="warp"):
        quant_matmul(jnp.zeros((1, 64)), make_packed(CASES[0]), implementation="warp")


def test_what_does_not_go_together_is_refused():
    x, packed = jnp.zeros((1, 64)), make_packed(CASES[0])
    with pytest.raises(ValueError, match="not 'int7'"):
        quant_matmul(x, packed, activations="int7")
    with pytest.raises(
        ValueError, match="int8 activations need weights in int8 or int4, not float32"
    ):
        quant_matmul(x, packed, activations="int8")
    with pytest.raises(ValueError, match=r"shape \(1, 63\), the weight takes rows of 64"):
        quant_matmul(x[:, 1:], packed)
    stacked = jax.tree.map(lambda a: a[None], packed)
    with pytest.raises(ValueError, match="one matrix is multiplied at a time"):
        quant_matmul(x, stacked)


def test_without_the_library_auto_is_xla_and_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no compiler")
    monkeypatch.setattr(native, "available", lambda: False)
    case = CASES[0]
    x = jnp.asarray(make_x(case, 2))
    with pytest.raises(KernelUnavailable, match="cannot run as 'cpu': no compiler"):
        quant_matmul(x, make_packed(case), implementation="cpu")
    got = quant_matmul(x, make_packed(case))
    want = quant_matmul(x, make_packed(case), implementation="xla")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_forced_variant_that_is_not_there_is_refused(monkeypatch):
    native_library.require()
    monkeypatch.setattr(cpu, "VARIANTS", (*cpu.VARIANTS, "avx2048"))
    case = CASES[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot run that variant"):
        run(make_x(case, 1), case, variant="avx2048")
