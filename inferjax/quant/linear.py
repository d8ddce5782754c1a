"""The one entry through which every matmul reads a weight: quantized leaves change this alone."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inferjax.quant.islands import lookup_on_mesh, product_on_mesh
from inferjax.quant.leaf import PackedLeaf, merge_parts, unpermute
from inferjax.quant.watched import Watched, watch, watch_tiles
from inferjax.shapes import align_last
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quant_matmul import quant_matmul, take_rows


def linear(
    x: Float[Array, "..."],
    weight: Array | PackedLeaf | Watched,
    spec: str,
    bias: Array | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Contract `x` with `weight` by the einsum `spec`, summing in float32.

    The result has `dtype`, by default x's. A packed weight is contracted over the axes it was
    packed for.

    Example: `linear(x, wqkv, "BTD,DKCH->BTKCH")`.
    """
    if isinstance(weight, Watched):
        x, weight = watch(x, weight), weight.weight
    if isinstance(weight, PackedLeaf):
        out = product_on_mesh(_packed, x, weight)
    else:
        out = _contract(x, weight, spec)
    if bias is not None:
        out = out + align_last(bias.astype(jnp.float32), out.ndim)
    return out.astype(x.dtype if dtype is None else dtype)


def _packed(x: Array, leaf: PackedLeaf) -> Float[Array, "..."]:
    """Run the product as rows times a packed matrix."""
    if leaf.num_batch_axes:
        return _packed_stack(x, leaf)
    num_summed = abs(leaf.num_in_axes)
    kept = x.shape[: x.ndim - num_summed]
    rows = x.reshape(*kept, -1)
    if leaf.permutation is not None:
        rows = jnp.take(rows, leaf.permutation, axis=-1, mode="clip", unique_indices=True)
    out = quant_matmul(rows, merge_parts(leaf), activations=leaf.activations)
    shape = leaf.shape[:-1] if leaf.num_in_axes < 0 else leaf.shape[num_summed:]
    return out.reshape(*kept, *shape)


def _packed_stack(x: Array, leaf: PackedLeaf) -> Float[Array, "..."]:
    """Run one product for each matrix of a stack: axes of the stack come before the summed ones."""
    num_lead = leaf.num_batch_axes + leaf.num_in_axes
    kept = x.shape[: x.ndim - num_lead]
    stack = leaf.shape[: leaf.num_batch_axes]
    rows = x.reshape(math.prod(kept), math.prod(stack), -1)
    tiles = jnp.swapaxes(rows, 0, 1)
    index = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    out = grouped_linear(tiles, leaf, index, jnp.full_like(index, tiles.shape[1]))
    return jnp.swapaxes(out, 0, 1).reshape(*kept, *stack, *leaf.shape[num_lead:])


def grouped_linear(
    tiles: Float[Array, "N R D"],
    weight: Array | PackedLeaf | Watched,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
) -> Float[Array, "N R F"]:
    """Multiply the first `tile_rows[n]` rows of tile n by `weight[tile_group[n]]`; others are zero.

    The axes of the weight behind its first two come out as one. The result has x's dtype.
    """
    if isinstance(weight, Watched):
        tiles, weight = watch_tiles(tiles, weight, tile_group, tile_rows), weight.weight
    if not isinstance(weight, PackedLeaf):
        stack = weight.reshape(*weight.shape[:2], -1)
        return grouped_matmul(tiles, stack, tile_group, tile_rows)
    if weight.permutation is not None:
        order = weight.permutation[tile_group]
        tiles = jnp.take_along_axis(tiles, order[:, None], axis=2, mode="clip")
    matrix = merge_parts(weight)
    return grouped_matmul(tiles, matrix, tile_group, tile_rows, activations=weight.activations)


def _contract(x: Array, weight: Array, spec: str) -> Float[Array, "..."]:
    """Run the einsum as one plain matrix product where the weight's axes allow it.

    XLA may transpose (copy) a weight with several contracted axes to suit the layout of x, in every
    step; a matrix it reads as it is.
    """
    inputs, result = spec.split("->")
    x_axes, w_axes = inputs.split(",")
    summed = "".join(axis for axis in x_axes if axis in w_axes and axis not in result)
    if x_axes.startswith("..."):
        return jnp.einsum(spec, x, weight, preferred_element_type=jnp.float32)
    if not (x_axes.endswith(summed) and w_axes.startswith(summed)):
        # One product a head. XLA:CPU refuses bfloat16 here when x comes first (JAX 0.12).
        flipped = f"{w_axes},{x_axes}->{result}"
        return jnp.einsum(flipped, weight, x, preferred_element_type=jnp.float32)
    kept = x.shape[: x.ndim - len(summed)]
    rows = x.reshape(math.prod(kept), -1)
    matrix = weight.reshape(rows.shape[1], -1)
    out = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
    return out.reshape(*kept, *weight.shape[len(summed) :])


def lookup(table: Float[Array, "V D"] | PackedLeaf, ids: Int[Array, "..."]) -> Float[Array, "..."]:
    """Read rows of an embedding; ids outside the table read its first or last row.

    Callers mark such rows, by status or NaN; the clamp only keeps their neighbours unharmed.
    """
    if isinstance(table, PackedLeaf):
        return lookup_on_mesh(_take_rows, table, ids)
    return jnp.take(table, ids, axis=0, mode="clip")


def _take_rows(table: PackedLeaf, ids: Int[Array, "..."]) -> Float[Array, "..."]:
    return unpermute(take_rows(merge_parts(table), ids), table, axis=-1)
