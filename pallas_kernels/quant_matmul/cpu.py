"""The product on the CPU by the native library: weights are decoded in registers as they stream by.

A result depends on its row and column only, bit for bit, within one variant of the instruction set:
not on the number of rows, the tiles or the threads. There is no second path to pin.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax
from jaxtyping import Array, Float

from pallas_kernels import native
from pallas_kernels.quant_matmul.packed import FORMATS, PackedWeight
from pallas_kernels.unavailable import KernelUnavailable

# The order is the kernel's: cpu_problem.h names the same three.
ACTIVATIONS = ("float32", "bfloat16", "int8")
VARIANTS = ("portable", "avx2", "avx512", "avx512bf16")


def quant_matmul(
    x: Float[Array, "M K"],
    weight: PackedWeight,
    *,
    activations: str,
    variant: str | None = None,
    max_threads: int = 0,
) -> Float[Array, "M N"]:
    """Multiply rows with a packed weight; see the package for the contract.

    `variant` forces an instruction set (None: the best that runs here), `max_threads` limits the
    threads (0: all of XLA's pool); both are for tests and measurements.

    Raises: KernelUnavailable.
    """
    attributes = attributes_of("quant_matmul", weight, activations, variant, max_threads)

    @custom_batching.custom_vmap
    def multiply(x: Array, weight: PackedWeight) -> Array:
        return _call(x, weight, attributes)

    @multiply.def_vmap
    def _(axis_size: int, batched: Any, x: Array, weight: PackedWeight) -> tuple[Array, bool]:
        x_batched, weight_batched = batched
        if any(jax.tree.leaves(weight_batched)):
            return _map_over_weights(multiply, axis_size, batched, x, weight), True
        del x_batched  # nothing else is left to be mapped
        rows = multiply(x.reshape(axis_size * x.shape[1], x.shape[2]), weight)
        return rows.reshape(*x.shape[:-1], weight.num_out), True

    return multiply(x, weight)


def attributes_of(
    op: str, weight: PackedWeight, activations: str, variant: str | None, max_threads: int
) -> dict[str, np.int64]:
    """Return what a native call on packed weights says besides its operands.

    Raises: KernelUnavailable where the op cannot run natively.
    """
    if reason := native.unavailable_reason():
        raise KernelUnavailable(f"{op} cannot run as 'cpu': {reason}")
    return {
        "format": np.int64(FORMATS.index(weight.format)),
        "activations": np.int64(ACTIVATIONS.index(activations)),
        "group": np.int64(weight.group),
        "variant": np.int64(-1 if variant is None else VARIANTS.index(variant)),
        "max_threads": np.int64(max_threads),
    }


def operands_of(weight: PackedWeight) -> list[Array]:
    """Return the arrays of a packed weight in the kernel's order."""
    return [a for a in (weight.values, weight.scales, weight.minimums) if a is not None]


def _call(x: Array, weight: PackedWeight, attributes: dict[str, np.int64]) -> Float[Array, "M N"]:
    result = jax.ShapeDtypeStruct((x.shape[0], weight.num_out), jnp.float32)
    call = jax.ffi.ffi_call(native.target("PkQuantMatmul"), result)
    return call(x, *operands_of(weight), **attributes)


def _map_over_weights(
    multiply: Any, axis_size: int, batched: Any, x: Array, weight: PackedWeight
) -> Float[Array, "B M N"]:
    """Run one product after the other: each reads weights of its own."""
    leaves, treedef = jax.tree.flatten((x, weight))
    is_mapped = jax.tree.leaves(batched)

    def one(index: Array) -> Array:
        chosen = [
            lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) if mapped else leaf
            for leaf, mapped in zip(leaves, is_mapped, strict=True)
        ]
        return multiply(*jax.tree.unflatten(treedef, chosen))

    return lax.map(one, jnp.arange(axis_size, dtype=jnp.int32))
