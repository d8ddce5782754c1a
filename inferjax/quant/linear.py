"""The one entry through which every matmul reads a weight: a quantized leaf changes this file only."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear(
    x: Float[Array, "..."], weight: Array, spec: str, bias: Array | None = None
) -> Float[Array, "..."]:
    """Contract `x` with `weight` by the einsum `spec`; accumulate in float32, return x's dtype.

    Example: `linear(x, wqkv, "BTD,DKCH->BTKCH")`.
    """
    out = jnp.einsum(spec, x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def lookup(table: Float[Array, "V D"], ids: Int[Array, "..."]) -> Float[Array, "..."]:
    """Read rows of an embedding; ids outside the table read its first or last row.

    Callers report such ids by status, so the clamp only keeps the row's neighbours unharmed.
    """
    return jnp.take(table, ids, axis=0, mode="clip")
