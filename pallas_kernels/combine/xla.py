"""Joining parts as split keys of one kernel are joined: a finished part has a weight of one."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.combine import FLOOR, LOG2E
from pallas_kernels.paged_attention.combine import combine as combine_sums


def combine(
    outs: Float[Array, "parts *rows H W"],
    lses: Float[Array, "parts *rows H"],
    *,
    sinks: Float[Array, "..."] | None,
) -> tuple[Float[Array, "*rows H W"], Float[Array, "*rows H"]]:
    """Join parts; see the package for the contract."""
    lses = lses.astype(jnp.float32)
    empty = jnp.isneginf(lses)
    sums = jnp.where(empty[..., None], 0.0, outs.astype(jnp.float32))
    peaks = jnp.where(empty, FLOOR, lses * LOG2E)
    out, lse = combine_sums(sums, peaks, jnp.where(empty, 0.0, 1.0), sinks)
    return out.astype(outs.dtype), lse
