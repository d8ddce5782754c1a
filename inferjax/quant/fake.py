"""Rounding that training sees through: values of packed weights, gradients of plain ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from inferjax.quant.schemes import Scheme, encode, grid_of, group_rows, per_row, round_to_nearest
from pallas_kernels.quant_matmul import QUANTIZED, dequantize


def rounded_straight_through(
    matrix: Float[Array, "*stack K N"], scheme: Scheme
) -> Float[Array, "*stack K N"]:
    """Return the values that a packed matrix has; their gradient is that of the matrix itself.

    Where a value lies beyond the codes of its group it is clipped, and has no gradient.

    Source: straight-through estimator, arXiv 1308.3432; clipping as in arXiv 1712.05877.
    """

    @jax.custom_jvp
    def rounded(matrix: Array) -> Array:
        return dequantize(round_to_nearest(matrix, scheme))

    @rounded.defjvp
    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (matrix,), (change,) = primals, tangents
        passed = jnp.where(_inside(matrix, scheme), change.astype(jnp.float32), 0.0)
        return rounded(matrix), passed

    return rounded(matrix)


def _inside(matrix: Float[Array, "*stack K N"], scheme: Scheme) -> Bool[Array, "*stack K N"]:
    """Tell which values lie within their group's grid."""
    if scheme.format not in QUANTIZED:
        return jnp.ones(matrix.shape, jnp.bool_)
    grouped = group_rows(matrix.astype(jnp.float32), scheme)
    inside = encode(grouped, per_row(grid_of(grouped, scheme)), scheme)[1]
    *stack, num_rows, num_out = matrix.shape
    return inside.reshape(*stack, -1, num_out)[..., :num_rows, :]
