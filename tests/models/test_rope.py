"""Rope frequencies against formulas written anew in float64, and the rotation's properties."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferjax.config import Rope
from inferjax.layers.rope import inverse_frequencies, rotate, rotation

DIM, THETA = 16, 10_000.0
# float32 powers and quotients against float64: a few units in the last place.
RTOL = 2e-6


def plain(theta=THETA, dim=DIM):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def test_plain_frequencies_fall_geometrically():
    frequencies, factor = inverse_frequencies(Rope(theta=THETA, dim=DIM))
    np.testing.assert_allclose(frequencies, plain(), rtol=RTOL)
    assert frequencies.dtype == np.float32
    assert factor == 1.0


def test_linear_divides_every_frequency():
    rope = Rope(theta=THETA, dim=DIM, scaling="linear", factor=8.0)
    np.testing.assert_allclose(inverse_frequencies(rope)[0], plain() / 8, rtol=RTOL)


@pytest.mark.parametrize(("max_context", "stretch"), [(64, 1.0), (32, 1.0), (256, 7.0)])
def test_dynamic_stretches_the_base_only_beyond_the_original(max_context, stretch):
    rope = Rope(
        theta=THETA,
        dim=DIM,
        scaling="dynamic",
        factor=2.0,
        original_context=64,
        max_context=max_context,
    )
    base = THETA * stretch ** (DIM / (DIM - 2))
    np.testing.assert_allclose(inverse_frequencies(rope)[0], plain(base), rtol=RTOL)


def test_llama3_divides_slow_keeps_fast_blends_between():
    rope = Rope(
        theta=500_000.0,
        dim=64,
        scaling="llama3",
        factor=8.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected = []
    for f in plain(500_000.0, 64):
        wavelength = 2 * math.pi / f
        if wavelength > 8192:
            expected.append(f / 8)
        elif wavelength < 8192 / 4:
            expected.append(f)
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected.append((1 - smooth) * f / 8 + smooth * f)
    got = inverse_frequencies(rope)[0]
    np.testing.assert_allclose(got, expected, rtol=RTOL)
    assert sum(g not in (f, f / 8) for g, f in zip(got, plain(500_000.0, 64), strict=True)) > 0


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_turns_within_the_original_context(truncate):
    rope = Rope(
        theta=THETA,
        dim=64,
        scaling="yarn",
        factor=4.0,
        original_context=2048,
        truncate=truncate,
    )

    def pair_with(turns):
        return 64 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = pair_with(32), pair_with(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, f in enumerate(plain(THETA, 64)):
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(f / 4 * share + f * (1 - share))
    frequencies, factor = inverse_frequencies(rope)
    np.testing.assert_allclose(frequencies, expected, rtol=RTOL)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.7, "mscale_all_dim": 1.0},
            (0.07 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
        ),
        ({"mscale": 0.7}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor_follows_mscale(fields, expected):
    rope = Rope(theta=THETA, dim=DIM, scaling="yarn", factor=40.0, original_context=4096, **fields)
    assert inverse_frequencies(rope)[1] == pytest.approx(expected)


@pytest.mark.parametrize(("max_context", "kind"), [(64, "short"), (65, "long")])
def test_longrope_picks_its_factors_by_the_served_context(max_context, kind):
    lists = {"short": tuple(1.0 + i for i in range(8)), "long": tuple(2.0 + i for i in range(8))}
    rope = Rope(
        theta=THETA,
        dim=DIM,
        scaling="longrope",
        factor=4.0,
        original_context=64,
        max_context=max_context,
        long_factor=lists["long"],
        short_factor=lists["short"],
    )
    frequencies, factor = inverse_frequencies(rope)
    np.testing.assert_allclose(frequencies, plain() / lists[kind], rtol=RTOL)
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_rotation_turns_each_pair_as_a_complex_number(rng):
    rope = Rope(theta=THETA, dim=8)
    x = rng.normal(size=(2, 3, 2, 12)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 50, 900]], np.int32)
    pairs = x[..., :4] + 1j * x[..., 4:8]
    turned = pairs * np.exp(1j * positions[..., None, None] * plain(dim=8))
    expected = np.concatenate([turned.real, turned.imag, x[..., 8:]], axis=-1)
    got = rotate(jnp.asarray(x), rotation(jnp.asarray(positions), rope))
    # An angle of 900 is good to 3e-5 in float32.
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_rotation_scales_by_the_attention_factor(rng):
    x = jnp.asarray(rng.normal(size=(1, 2, 4)), jnp.float32)
    rope = Rope(
        theta=THETA,
        dim=4,
        scaling="yarn",
        factor=2.0,
        original_context=64,
        attention_factor=1.5,
    )
    at_zero = rotate(x, rotation(jnp.zeros((1, 2), jnp.int32), rope))
    np.testing.assert_allclose(at_zero, 1.5 * x, rtol=1e-6)


def test_scores_depend_only_on_the_distance(rng):
    rope = Rope(theta=THETA, dim=8)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32) for _ in range(2))

    def score(m, n):
        turned = [
            rotate(v, rotation(jnp.full((1, 1), p, jnp.int32), rope)) for v, p in ((q, m), (k, n))
        ]
        return float(jnp.vdot(*turned))

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-4)


def test_rotation_keeps_the_dtype_and_computes_in_float32(rng):
    x = jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.bfloat16)
    rope = Rope(theta=THETA, dim=8)
    positions = jnp.full((1, 1), 1001, jnp.int32)
    got = jax.jit(lambda a: rotate(a, rotation(positions, rope)))(x)
    exact = rotate(x.astype(jnp.float32), rotation(positions, rope))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
