"""The definition of correct: group after group, codes first, then their scale and minimum."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quant_matmul.packed import MAX_GROUP, PackedWeight, unpack
from pallas_kernels.quant_matmul.xla import round_to_int8


def quant_matmul(
    x: Float[Array, "M K"], weight: PackedWeight, *, activations: str
) -> Float[Array, "M N"]:
    """Multiply the slow and obvious way; see the package for the contract."""
    x = x.astype(jnp.float32)
    if activations == "bfloat16":
        x = x.astype(jnp.bfloat16).astype(jnp.float32)
    if activations == "int8":
        x = round_to_int8(x, weight.group or MAX_GROUP)
    codes = unpack(weight).astype(jnp.float32)
    total = jnp.zeros((x.shape[0], weight.num_out), jnp.float32)
    group = weight.group or max(weight.num_in, 1)
    for index, start in enumerate(range(0, weight.num_in, group)):
        terms = slice(start, start + group)
        added = jnp.dot(x[:, terms], codes[terms], precision=lax.Precision.HIGHEST)
        if weight.scales is not None:
            added = added * _columns(weight, weight.scales, index)
        if weight.minimums is not None:
            sums = x[:, terms].sum(-1, keepdims=True)
            added = added + sums * _columns(weight, weight.minimums, index)
        total = total + added
    return total


def _columns(weight: PackedWeight, packed: Array, group: int) -> Float[Array, "1 N"]:
    """Return what the columns of one group share."""
    return packed[:, group, :].reshape(1, -1)[:, : weight.num_out].astype(jnp.float32)
