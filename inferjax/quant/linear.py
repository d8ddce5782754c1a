"""The one entry through which every matmul reads a weight: quantized leaves change this alone."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inferjax.quant.leaf import PackedLeaf, unpermute
from inferjax.shapes import align_last
from pallas_kernels.quant_matmul import quant_matmul, take_rows


def linear(
    x: Float[Array, "..."],
    weight: Array | PackedLeaf,
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
    out = _packed(x, weight) if isinstance(weight, PackedLeaf) else _contract(x, weight, spec)
    if bias is not None:
        out = out + align_last(bias.astype(jnp.float32), out.ndim)
    return out.astype(x.dtype if dtype is None else dtype)


def _packed(x: Array, leaf: PackedLeaf) -> Float[Array, "..."]:
    """Run the product as rows times a packed matrix."""
    num_summed = abs(leaf.num_in_axes)
    kept = x.shape[: x.ndim - num_summed]
    rows = x.reshape(*kept, -1)
    if leaf.permutation is not None:
        rows = jnp.take(rows, leaf.permutation, axis=-1, mode="clip", unique_indices=True)
    out = quant_matmul(rows, leaf.matrix, activations=leaf.activations)
    shape = leaf.shape[:-1] if leaf.num_in_axes < 0 else leaf.shape[num_summed:]
    return out.reshape(*kept, *shape)


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
        return unpermute(take_rows(table.matrix, ids), table, axis=-1)
    return jnp.take(table, ids, axis=0, mode="clip")
