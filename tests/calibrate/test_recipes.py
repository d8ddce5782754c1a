"""Each recipe on one matrix: it loses less than rounding to nearest, on every scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from inferjax.calibrate import RECIPES, awq, gptq
from inferjax.calibrate.grids import diagonal_blocks
from inferjax.calibrate.recipes import recipe_named
from inferjax.errors import UnsupportedConfig
from inferjax.quant.schemes import SCHEMES, round_to_nearest
from inferjax.quant.watched import InputStatistics, statistics_of
from pallas_kernels.quant_matmul import QUANTIZED, dequantize

QUANTIZED_SCHEMES = [name for name, scheme in SCHEMES.items() if scheme.format in QUANTIZED]


def made_up(rng, num_in=200, num_out=24):
    """Return a matrix with outliers, and inputs that depend on each other, some of them large."""
    matrix = rng.standard_t(4, size=(num_in, num_out)).astype(np.float32)
    mixed = rng.normal(size=(num_in, num_in)) / np.sqrt(num_in)
    mixed += np.diag(rng.exponential(size=num_in))
    rows = (rng.normal(size=(600, num_in)) @ mixed).astype(np.float32)
    return jnp.asarray(matrix), jnp.asarray(rows)


def loss(packed, matrix, rows):
    return float(jnp.sum((rows @ (dequantize(packed) - matrix)) ** 2))


@pytest.mark.parametrize("name", QUANTIZED_SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_loses_less_than_rounding_to_nearest(rng, name, act_order):
    scheme, (matrix, rows) = SCHEMES[name], made_up(rng)
    packed = gptq.pack(matrix, statistics_of(rows), scheme, act_order=act_order)
    plain = round_to_nearest(matrix, scheme)
    assert_alike(packed, plain)
    assert loss(packed, matrix, rows) < 0.75 * loss(plain, matrix, rows)


def assert_alike(packed, plain):
    """Compare all but the values."""
    assert jax.tree.structure(packed) == jax.tree.structure(plain)
    assert jax.tree.map(jnp.shape, packed) == jax.tree.map(jnp.shape, plain)


@pytest.mark.parametrize("name", QUANTIZED_SCHEMES)
def test_clipping_never_harms_a_group_and_pays_in_four_bits(rng, name):
    scheme, (matrix, rows) = SCHEMES[name], made_up(rng)
    packed, plain = awq.pack(matrix, statistics_of(rows), scheme), round_to_nearest(matrix, scheme)
    assert_alike(packed, plain)
    size = scheme.group or matrix.shape[0]
    groups = [slice(start, start + size) for start in range(0, matrix.shape[0], size)]
    ours, nearest = (
        sum(float(jnp.sum((rows[:, g] @ (dequantize(p) - matrix)[g]) ** 2)) for g in groups)
        for p in (packed, plain)
    )
    assert ours <= nearest * (0.95 if scheme.format == "int4" else 1 + 1e-5)


@pytest.mark.parametrize("name", ["int4", "int4-g64"])
def test_inputs_that_are_alike_and_independent_leave_nothing_to_make_up_for(rng, name):
    matrix = made_up(rng)[0]
    num_in = matrix.shape[0]
    seen = InputStatistics(
        gram=jnp.eye(num_in), magnitude=jnp.ones(num_in), num_rows=jnp.float32(1)
    )
    packed = gptq.pack(matrix, seen, SCHEMES[name], act_order=False)
    plain = round_to_nearest(matrix, SCHEMES[name])
    assert_array_equal(dequantize(packed), dequantize(plain))
    # Grids that are chosen beforehand are those that lose least.
    ordered = gptq.pack(matrix, seen, SCHEMES[name])
    assert loss(ordered, matrix, jnp.eye(num_in)) <= loss(plain, matrix, jnp.eye(num_in))


def test_inputs_never_seen_or_always_equal_do_no_harm(rng):
    matrix, rows = made_up(rng)
    rows = rows.at[:, :40].set(0.0).at[:, 41].set(rows[:, 40])
    for recipe in ("awq", "gptq"):
        packed = RECIPES[recipe].pack(matrix, statistics_of(rows), SCHEMES["int4-g64"])
        values = np.asarray(dequantize(packed))
        assert np.isfinite(values).all()
        assert np.abs(values[:40] - matrix[:40]).max() < 1.5
    nothing = statistics_of(jnp.zeros_like(rows))
    packed = gptq.pack(matrix, nothing, SCHEMES["int4-g64"], act_order=False)
    assert_array_equal(
        dequantize(packed), dequantize(round_to_nearest(matrix, SCHEMES["int4-g64"]))
    )


def test_blocks_of_the_diagonal(rng):
    gram = jnp.asarray(rng.normal(size=(10, 10)), jnp.float32)
    blocks = diagonal_blocks(gram, 4)
    assert blocks.shape == (3, 4, 4)
    assert_array_equal(blocks[1], gram[4:8, 4:8])
    assert_array_equal(blocks[2, :2, :2], gram[8:, 8:])
    assert not blocks[2, 2:].any()


def test_an_unknown_recipe_is_refused():
    for name in ("hqq", "", None):
        with pytest.raises(UnsupportedConfig, match="gptq"):
            recipe_named(name)
