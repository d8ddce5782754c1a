"""The product in plain XLA: dequantizes the whole weight, then one float32 dot."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quant_matmul.packed import MAX_GROUP, PackedWeight, dequantize


def quant_matmul(
    x: Float[Array, "M K"], weight: PackedWeight, *, activations: str
) -> Float[Array, "M N"]:
    """Multiply rows with a packed weight; see the package for the contract."""
    x = x.astype(jnp.float32)
    if activations == "bfloat16":
        x = x.astype(jnp.bfloat16).astype(jnp.float32)
    if activations == "int8":
        x = round_to_int8(x, weight.group or MAX_GROUP)
    return jnp.dot(x, dequantize(weight), precision=lax.Precision.HIGHEST)


def round_to_int8(x: Float[Array, "M K"], group: int) -> Float[Array, "M K"]:
    """Round each group of a row to 255 equal steps of its largest magnitude.

    A group with a NaN or an infinity becomes NaN; one that is all but zero (1e-36) becomes zero.
    """
    rows, num_in = x.shape
    missing = -num_in % group
    groups = jnp.pad(x, ((0, 0), (0, missing))).reshape(rows, (num_in + missing) // group, group)
    peak = jnp.abs(groups).max(-1, keepdims=True)
    tiny = peak < 1e-36
    codes = jnp.round(groups * (127.0 / jnp.where(tiny, 1.0, peak)))
    rounded = jnp.where(tiny, 0.0, codes * (peak / 127.0))
    rounded = jnp.where(jnp.isfinite(peak), rounded, jnp.nan)
    return rounded.reshape(rows, num_in + missing)[:, :num_in]
