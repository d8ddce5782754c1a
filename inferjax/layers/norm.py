"""RMSNorm and LayerNorm, computed in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from inferjax.config import Norm
from inferjax.params import NormParams
from inferjax.shapes import align_last


def normalize(
    x: Float[Array, "*rows D"], w: NormParams, norm: Norm, *, num_axes: int = 1
) -> Float[Array, "*rows D"]:
    """Normalise the last `num_axes` axes as one in float32 and return x's dtype.

    Weights of more than one axis belong to the last axes of x.

    Source: RMSNorm, arXiv 1910.07467; LayerNorm, arXiv 1607.06450.
    """
    y = x.astype(jnp.float32)
    axes = tuple(range(-num_axes, 0))
    if norm.kind == "layer":
        y = y - jnp.mean(y, axis=axes, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=axes, keepdims=True) + norm.eps)
    if w.weight is not None:
        scale = align_last(w.weight.astype(jnp.float32), y.ndim)
        y = y * (scale + 1.0 if norm.unit_offset else scale)
    if w.bias is not None:
        y = y + align_last(w.bias.astype(jnp.float32), y.ndim)
    return y.astype(x.dtype)
