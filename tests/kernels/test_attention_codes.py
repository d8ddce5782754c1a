"""Keys and values in eight bits: how far codes are from what they stand for, and bad numbers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention.codes import LARGEST, decode, encode

DTYPES = sorted(LARGEST)
WIDTH, VALUE_DIM = 24, 16


def tokens(planes: int, count: int = 200, seed: int = 0) -> np.ndarray:
    """Tokens of very different sizes; the last columns of a latent are much larger."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, planes, WIDTH))
    values *= np.exp(rng.uniform(-20, 20, (count, 1, 1)))
    if planes == 1:
        values[..., VALUE_DIM:] *= 300
    return values.astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    codes, factors = encode(jnp.asarray(values), dtype, value_dim=VALUE_DIM)
    return np.asarray(codes), np.asarray(factors)


def parts(values: np.ndarray) -> list[np.ndarray]:
    """Return the numbers that share a factor, in the order of factors."""
    if values.shape[-2] == 2:
        return [values[..., 0, :], values[..., 1, :]]
    return [values[..., 0, :VALUE_DIM], values[..., 0, VALUE_DIM:]]


@pytest.mark.parametrize("planes", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_is_further_away_than_half_a_step(dtype, planes):
    values = tokens(planes)
    codes, factors = encode(jnp.asarray(values), dtype, value_dim=VALUE_DIM)
    found = np.asarray(decode(codes, factors, value_dim=VALUE_DIM))
    for given, got in zip(parts(values), parts(found), strict=True):
        peak = np.abs(given).max(-1, keepdims=True)
        step = peak / 127 * (1 + 2**-8)
        if dtype == "uint8":  # three bits behind the leading one, down to 2^-9 of a factor
            step = np.maximum(np.abs(given) * 2**-3, peak / 448 * 2**-9) * (1 + 2**-7)
        assert (np.abs(given - got) <= 0.5 * step).all()


@pytest.mark.parametrize("planes", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_numpy(dtype, planes):
    values = tokens(planes, seed=1)
    codes, factors = rounded(values, dtype)
    held = codes if dtype == "int8" else codes.view(ml_dtypes.float8_e4m3fn)
    for index, (given, got) in enumerate(zip(parts(values), parts(held), strict=True)):
        peak, largest = np.abs(given).max(-1), np.float32(LARGEST[dtype])
        known = (peak / largest).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(factors[:, index], known)
        scaled = np.clip(given / known.astype(np.float32)[:, None], -largest, largest)
        want = np.rint(scaled) if dtype == "int8" else scaled
        np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("planes", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_already_stays(dtype, planes):
    once = encode(jnp.asarray(tokens(planes, seed=2)), dtype, value_dim=VALUE_DIM)
    twice = encode(decode(*once, value_dim=VALUE_DIM), dtype, value_dim=VALUE_DIM)
    for got, known in zip(twice, once, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(known))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_in_its_own_token_and_part(dtype, bad):
    values = tokens(2)
    known = np.asarray(decode(*map(jnp.asarray, rounded(values, dtype)), value_dim=VALUE_DIM))
    values[7, 1, 3] = bad
    codes, factors = rounded(values, dtype)
    found = np.array(decode(jnp.asarray(codes), jnp.asarray(factors), value_dim=VALUE_DIM))
    assert np.isnan(found[7, 1]).all()
    found[7, 1] = known[7, 1]
    np.testing.assert_array_equal(found, known)
    held = codes if dtype == "int8" else codes.view(ml_dtypes.float8_e4m3fn)
    assert np.isfinite(held.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_numbers_next_to_zero_or_infinity_are_kept(dtype):
    values = np.zeros((4, 2, WIDTH), np.float32)
    values[1], values[2], values[3] = 1e-40, 3e38, -0.0
    values[3, 0, 0] = 1.0
    codes, factors = rounded(values, dtype)
    found = np.asarray(decode(jnp.asarray(codes), jnp.asarray(factors), value_dim=VALUE_DIM))
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1], values[1], atol=2e-38)
    np.testing.assert_allclose(found[2], values[2], rtol=2**-8)
    assert abs(found[3, 0, 0] - 1) < 2**-8
    assert not found[3, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rotary_columns_take_no_bits_from_a_latent(dtype):
    values = tokens(1)
    alone = values.copy()
    alone[..., VALUE_DIM:] = 0
    mixed, lone = (rounded(x, dtype)[0][..., :VALUE_DIM] for x in (values, alone))
    np.testing.assert_array_equal(mixed, lone)
