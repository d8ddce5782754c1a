"""Grouped matmul as a scan over tiles in plain XLA: reads the weight of each live tile once."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.packed import PackedWeight
from pallas_kernels.unbatched import max_each


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: Float[Array, "E D F"] | PackedWeight,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
    *,
    activations: str = "float32",
) -> Float[Array, "N R F"]:
    """Multiply tile after tile, skipping empty ones; see the package for the contract."""
    packed = isinstance(weights, PackedWeight)
    num_out = weights.num_out if packed else weights.shape[2]

    # Without it, a gradient in x would keep the (unpacked) matrix of every tile.
    @jax.checkpoint
    def multiply(tile: Array, group: Array) -> Array:
        weight = jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, group, axis=0, keepdims=False), weights
        )
        if isinstance(weight, PackedWeight):
            return xla.quant_matmul(tile, weight, activations=activations).astype(tile.dtype)
        return jnp.dot(tile, weight, preferred_element_type=jnp.float32).astype(tile.dtype)

    def skip(tile: Array, group: Array) -> Array:
        del group
        return jnp.zeros((tile.shape[0], num_out), tile.dtype)

    def step(carry: None, item: tuple[Array, Array, Array]) -> tuple[None, Array]:
        is_live, tile, group = item
        return carry, lax.cond(is_live, multiply, skip, tile, group)

    out = lax.scan(step, None, (max_each(tile_rows) > 0, x, tile_group))[1]
    row = lax.broadcasted_iota(tile_rows.dtype, (*x.shape[:2], 1), 1)
    return jnp.where(row < tile_rows[:, None, None], out, 0)
