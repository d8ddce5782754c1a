"""The definition of correct: gather one weight per tile and multiply."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quant_matmul import reference
from pallas_kernels.quant_matmul.packed import PackedWeight


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: Float[Array, "E D F"] | PackedWeight,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
    *,
    activations: str = "float32",
) -> Float[Array, "N R F"]:
    """Multiply every tile by a gathered copy of its weight; see the package for the contract."""
    gathered = jax.tree.map(lambda leaf: jnp.take(leaf, tile_group, axis=0, mode="clip"), weights)
    if isinstance(gathered, PackedWeight):
        tiles = [
            reference.quant_matmul(
                x[n], jax.tree.map(lambda leaf, n=n: leaf[n], gathered), activations=activations
            )
            for n in range(x.shape[0])
        ]
        out = jnp.stack(tiles) if tiles else jnp.zeros((*x.shape[:2], gathered.num_out))
    else:
        out = jnp.einsum("NRD,NDF->NRF", x, gathered, preferred_element_type=jnp.float32)
    row = lax.broadcasted_iota(tile_rows.dtype, (*x.shape[:2], 1), 1)
    return jnp.where(row < tile_rows[:, None, None], out, 0.0).astype(x.dtype)
