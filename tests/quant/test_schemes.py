"""Every scheme of the table: rounding errors within its steps, edge values, NumPy and JAX alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from inferjax.errors import UnsupportedConfig
from inferjax.quant.schemes import SCHEMES, round_to_nearest, scheme_named
from pallas_kernels.quant_matmul import (
    IMPLEMENTATIONS,
    QUANTIZED,
    dequantize,
    quant_matmul,
    unpack,
)
from tests.kernels import native_library

# The largest error as a share of the largest value that shares a scale: half a step of the codes.
HALF_STEPS = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "int8": 0.5 / 127,
    "int4": 1.0 / 16,
    "float8": 2.0**-4,
}


# What may be lost next to zero: fifteen times half of the smallest half, or all of the smallest
# float32 number that XLA on a CPU does not take for zero.
LOST_NEXT_TO_ZERO = {"float32": 15 * 2.0**-126, "float16": 15 * 2.0**-25}


def half_below(values: np.ndarray) -> np.ndarray:
    """Return the largest float16 numbers that are not above."""
    halves = values.astype(np.float16)
    below = np.nextafter(halves, np.float16(-np.inf))
    return np.where(halves > values, below, halves).astype(np.float32)


def grouped(values: np.ndarray, group: int) -> list[np.ndarray]:
    return np.split(values, range(group, len(values), group)) if group else [values]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_errors_stay_within_half_a_step(rng, name, rows):
    scheme = SCHEMES[name]
    matrix = rng.normal(size=(rows, 19)).astype(np.float32)
    seen = dequantize(round_to_nearest(matrix, scheme))
    for ours, known in zip(grouped(seen, scheme.group), grouped(matrix, scheme.group), strict=True):
        largest = np.abs(known).max(axis=0)
        if scheme.minimum:
            half = scheme.scale_dtype == "float16"
            lowest = half_below(known.min(axis=0)) if half else known.min(axis=0)
            largest = known.max(axis=0) - lowest
        bound = HALF_STEPS[scheme.format] * largest * (1 + 1e-5) + 1e-12
        # int4 without a minimum has the code 8 on one side only.
        bound = bound * (2 if scheme.format == "int4" and not scheme.minimum else 1)
        assert (np.abs(ours - known) <= bound).all()


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if s.format in ("int8", "int4")])
def test_values_on_the_grid_are_kept(rng, name):
    scheme = SCHEMES[name]
    low, high = (0, 15) if scheme.minimum else (-8, 7) if scheme.format == "int4" else (-127, 127)
    codes = rng.integers(low, high + 1, size=(256, 16))
    codes[:: scheme.group or 256] = low
    codes[1 :: scheme.group or 256] = high
    matrix = (codes * 0.25 - (1.0 if scheme.minimum else 0.0)).astype(np.float32)
    assert_array_equal(dequantize(round_to_nearest(matrix, scheme)), matrix)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("fill", [0.0, 1.5, -2.0])
def test_equal_values_are_kept(name, fill):
    matrix = np.full((70, 5), fill, np.float32)
    assert_array_equal(dequantize(round_to_nearest(matrix, SCHEMES[name])), matrix)


@pytest.mark.parametrize("name", SCHEMES)
def test_numpy_and_jax_agree(rng, name):
    matrix = rng.normal(size=(96, 33)).astype(np.float32)
    ours = round_to_nearest(matrix, SCHEMES[name])
    traced = jax.jit(lambda m: round_to_nearest(m, SCHEMES[name]))(matrix)
    apart = np.abs(np.asarray(dequantize(traced)) - np.asarray(dequantize(ours)))
    # A quotient that XLA rounds differently moves a value to the neighbouring code at most.
    assert np.mean(apart > 1e-5) < 1e-3


CODED = [name for name, scheme in SCHEMES.items() if scheme.format in QUANTIZED]
FILLS = {"zero": 0.0, "subnormal": 3e-39, "smallest scales": 1e-37}
LARGE = {"float32": 1e38, "float16": 6e4}


def rounded(matrix, name, where):
    """Return the packed matrix and its values, computed by NumPy or by XLA, which flushes."""
    matrix = matrix if where == "numpy" else jnp.asarray(matrix)
    run = functools.partial(round_to_nearest, scheme=SCHEMES[name])
    packed = (run if where == "numpy" else jax.jit(run))(matrix)
    return packed, np.asarray(dequantize(packed))


def shares_a_scale(name: str, row: int, rows: int) -> np.ndarray:
    group = SCHEMES[name].group or rows
    return np.arange(rows) // group == row // group


@pytest.mark.parametrize("where", ["numpy", "xla"])
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("fill", [*FILLS, "smallest halves", "large"])
def test_columns_next_to_zero_or_infinity_stay_near_what_they_were(rng, name, where, fill):
    dtype = SCHEMES[name].scale_dtype
    size = (FILLS | {"smallest halves": 1e-6, "large": LARGE[dtype]})[fill]
    matrix = (rng.uniform(-1, 1, size=(128, 20)) * size).astype(np.float32)
    matrix[:, 3] = rng.normal(size=128)
    values = rounded(matrix, name, where)[1]
    # Half a step, twice that where eight is on one side only, or what is lost next to zero.
    assert (np.abs(values - matrix)[:, :3] <= size / 8 + LOST_NEXT_TO_ZERO[dtype]).all()
    x = np.full((2, 128), 1e-3, np.float32)
    packed = jax.tree.map(jnp.asarray, rounded(matrix, name, where)[0])
    for implementation in IMPLEMENTATIONS:
        if implementation == "cpu":
            native_library.require()
        out = np.asarray(quant_matmul(jnp.asarray(x), packed, implementation=implementation))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[0, 3], 1e-3 * values[:, 3].sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["numpy", "xla"])
@pytest.mark.parametrize("name", CODED)
def test_what_is_not_finite_makes_all_that_shares_its_scale_nan(rng, name, where, bad):
    matrix = rng.normal(size=(128, 20)).astype(np.float32)
    known = rounded(matrix, name, where)[1]
    matrix[70, 5] = bad
    packed, values = rounded(matrix, name, where)
    broken = shares_a_scale(name, 70, 128)
    assert np.isnan(values[broken, 5]).all()
    values = np.where(np.isnan(values), known, values)
    assert_array_equal(values, known)
    assert np.isfinite(np.asarray(unpack(packed)).astype(np.float32)).all()


@pytest.mark.parametrize("where", ["numpy", "xla"])
@pytest.mark.parametrize("name", [name for name in CODED if SCHEMES[name].minimum])
def test_a_range_that_float32_does_not_hold_is_nan(name, where):
    matrix = np.tile(np.float32([[3e38], [-3e38]]), (32, 4))
    assert np.isnan(rounded(matrix, name, where)[1]).all()


def test_an_unknown_scheme_is_refused():
    for name in ("int3", "", None, 8):
        with pytest.raises(UnsupportedConfig, match="int4-g64"):
            scheme_named(name)
