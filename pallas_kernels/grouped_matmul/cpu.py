"""The product on the CPU by the native library: all tiles in one call, matrices where they lie.

A row's bits depend on the row and its matrix only, within one variant of the instruction set.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching
from jaxtyping import Array, Float, Int

from pallas_kernels import native
from pallas_kernels.quant_matmul.cpu import attributes_of, operands_of
from pallas_kernels.quant_matmul.packed import PackedWeight


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: PackedWeight,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
    *,
    activations: str,
    variant: str | None = None,
    max_threads: int = 0,
) -> Float[Array, "N R F"]:
    """Multiply the live rows of tiles; see the package for the contract.

    `variant` forces an instruction set (None: the best that runs here), `max_threads` limits the
    threads (0: all of XLA's pool); both are for tests and measurements.

    Raises: KernelUnavailable.
    """
    attributes = attributes_of("grouped_matmul", weights, activations, variant, max_threads)

    @custom_batching.custom_vmap
    def multiply(x: Array, weights: PackedWeight, groups: Array, rows: Array) -> Array:
        return _call(x, weights, groups, rows, attributes)

    @multiply.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Array, bool]:
        tiles = multiply(*_fold(axis_size, batched, *arrays))
        return tiles.reshape(axis_size, -1, *tiles.shape[1:]), True

    return multiply(x, weights, tile_group, tile_rows).astype(x.dtype)


def _call(
    x: Array, weights: PackedWeight, groups: Array, rows: Array, attributes: dict[str, np.int64]
) -> Float[Array, "N R F"]:
    result = jax.ShapeDtypeStruct((*x.shape[:2], weights.num_out), jnp.float32)
    call = jax.ffi.ffi_call(native.target("PkGroupedMatmul"), result)
    return call(
        x, groups.astype(jnp.int32), rows.astype(jnp.int32), *operands_of(weights), **attributes
    )


def _fold(
    size: int, batched: Any, x: Array, weights: PackedWeight, groups: Array, rows: Array
) -> tuple[Array, PackedWeight, Array, Array]:
    """Turn a mapped axis into more tiles, and into more matrices where weights are mapped."""
    x_batched, weights_batched, groups_batched, rows_batched = batched

    def merged(leaf: Array, is_mapped: bool) -> Array:
        whole = leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    flat_groups = merged(groups, groups_batched)
    if any(jax.tree.leaves(weights_batched)):
        num_matrices = jax.tree.leaves(weights)[0].shape[int(jax.tree.leaves(weights_batched)[0])]
        weights = jax.tree.map(merged, weights, weights_batched)
        instance = jnp.repeat(jnp.arange(size, dtype=jnp.int32), flat_groups.size // size)
        flat_groups = flat_groups.clip(0, num_matrices - 1) + instance * num_matrices
    return merged(x, x_batched), weights, flat_groups, merged(rows, rows_batched)
