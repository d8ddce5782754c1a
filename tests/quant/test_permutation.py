"""Packed leaves whose rows are in another order than the inputs: nothing of it shows outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from inferjax.quant.leaf import PackedLeaf, as_matrix, size_of, widen
from inferjax.quant.linear import linear, lookup
from inferjax.quant.schemes import SCHEMES, round_to_nearest

SCHEME = SCHEMES["int4"]


def make_leaf(rng, shape, num_in_axes, *, namespace=jnp):
    """Return a leaf whose groups are strewn over its inputs."""
    matrix = as_matrix(rng.normal(size=shape).astype(np.float32), num_in_axes)
    permutation = rng.permutation(len(matrix)).astype(np.int32)
    leaf = PackedLeaf(
        matrix=round_to_nearest(matrix[permutation], SCHEME),
        permutation=permutation,
        shape=shape,
        num_in_axes=num_in_axes,
    )
    return jax.tree.map(namespace.asarray, leaf)


@pytest.mark.parametrize("namespace", [np, jnp])
def test_widened_weight_has_the_order_of_its_inputs(rng, namespace):
    leaf = make_leaf(rng, (64, 3, 5), 1, namespace=namespace)
    plain = dataclasses.replace(leaf, permutation=None)
    wide, rows = np.asarray(widen(leaf)), np.asarray(widen(plain))
    assert isinstance(widen(leaf), namespace.ndarray)
    assert_array_equal(wide[np.asarray(leaf.permutation)], rows)
    assert size_of(leaf) - size_of(plain) == 64 * 4


@pytest.mark.parametrize(
    ("shape", "num_in_axes", "spec", "x_shape"),
    [
        ((64, 2, 24), 1, "BTD,DCF->BTCF", (2, 3, 64)),
        ((2, 4, 8, 40), 3, "BTKGH,KGHD->BTD", (2, 3, 2, 4, 8)),
        ((48, 64), -1, "BTD,VD->BTV", (2, 3, 64)),
    ],
)
def test_products_equal_those_of_the_widened_weight(rng, shape, num_in_axes, spec, x_shape):
    leaf = make_leaf(rng, shape, num_in_axes)
    x = jnp.asarray(rng.normal(size=x_shape).astype(np.float32))
    wide = widen(leaf)

    def run(x, weight):
        return linear(x, weight, spec)

    known = jnp.einsum(spec, x, wide, precision="highest")
    assert_allclose(jax.jit(run)(x, leaf), known, rtol=1e-5, atol=1e-4)
    assert_allclose(jax.vmap(run, (0, None))(x[:, None], leaf)[:, 0], known, rtol=1e-5, atol=1e-4)
    slope = jax.grad(lambda x: run(x, leaf).sum())(x)
    assert_allclose(slope, jax.grad(lambda x: run(x, wide).sum())(x), rtol=1e-5, atol=1e-4)


def test_rows_of_an_embedding_have_the_order_of_its_inputs(rng):
    leaf = make_leaf(rng, (48, 64), -1)
    ids = jnp.asarray([[0, 47], [5, 5]])
    assert_array_equal(lookup(leaf, ids), widen(leaf)[ids])
