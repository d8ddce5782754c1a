"""Every implementation of the grouped matmul against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul
from tests.tolerances import MATMUL_F32


def make_arrays(rng: np.random.Generator, num_tiles: int = 5):
    x = rng.standard_normal((num_tiles, 4, 24)).astype(np.float32)
    weights = rng.standard_normal((3, 24, 40)).astype(np.float32)
    groups = np.array([2, 0, 0, 1, 2], np.int32)[:num_tiles]
    return jnp.asarray(x), jnp.asarray(weights), jnp.asarray(groups)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("num_live", [0, 3, 5])
def test_grouped_matmul_equals_numpy(rng, implementation, num_live):
    x, weights, groups = make_arrays(rng)
    got = grouped_matmul(x, weights, groups, jnp.int32(num_live), implementation=implementation)
    want = np.einsum(
        "nrd,ndf->nrf", np.asarray(x, np.float64), np.asarray(weights)[np.asarray(groups)]
    )
    want[num_live:] = 0
    np.testing.assert_allclose(np.asarray(got), want, **MATMUL_F32)


def test_grouped_matmul_dead_tile_cannot_spread_nan(rng):
    x, weights, groups = make_arrays(rng)
    x = x.at[4].set(jnp.nan)
    got = np.asarray(grouped_matmul(x, weights, groups, jnp.int32(4)))
    assert np.isfinite(got).all()


def test_grouped_matmul_row_is_the_same_bits_in_any_tile(rng):
    x, weights, groups = make_arrays(rng)
    run = jax.jit(grouped_matmul)
    moved = run(x[::-1], weights, groups[::-1], jnp.int32(5))[::-1]
    np.testing.assert_array_equal(
        np.asarray(run(x, weights, groups, jnp.int32(5))), np.asarray(moved)
    )


def test_grouped_matmul_gradients_match_the_reference(rng):
    x, weights, groups = make_arrays(rng)

    def loss(x, weights, implementation):
        out = grouped_matmul(x, weights, groups, jnp.int32(3), implementation=implementation)
        return jnp.sum(jnp.sin(out))

    got = jax.grad(loss, (0, 1))(x, weights, "xla")
    want = jax.grad(loss, (0, 1))(x, weights, "reference")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **MATMUL_F32)
