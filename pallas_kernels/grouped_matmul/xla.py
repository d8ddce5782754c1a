"""Grouped matmul as a scan over tiles in plain XLA: reads the weight of each live tile once."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: Float[Array, "E D F"],
    tile_group: Int[Array, " N"],
    num_live: Int[Array, ""],
) -> Float[Array, "N R F"]:
    """Multiply tile after tile, skipping dead ones; see the package for the contract."""

    def multiply(tile: Array, group: Array) -> Array:
        weight = lax.dynamic_index_in_dim(weights, group, axis=0, keepdims=False)
        return jnp.dot(tile, weight, preferred_element_type=jnp.float32).astype(tile.dtype)

    def skip(tile: Array, group: Array) -> Array:
        del group
        return jnp.zeros((tile.shape[0], weights.shape[2]), tile.dtype)

    def step(index: Array, item: tuple[Array, Array]) -> tuple[Array, Array]:
        return index + 1, lax.cond(index < num_live, multiply, skip, *item)

    return lax.scan(step, jnp.int32(0), (x, tile_group))[1]
