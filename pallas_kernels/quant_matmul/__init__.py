"""Products of activations with weights packed in 32, 16, 8 or 4 bits."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
from jaxtyping import Array, Float

from pallas_kernels import native
from pallas_kernels.quant_matmul import cpu, reference, xla
from pallas_kernels.quant_matmul.packed import (
    FORMATS,
    QUANTIZED,
    PackedWeight,
    dequantize,
    pack,
    pack_codes,
    take_rows,
    unpack,
)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.quant_matmul,
    "cpu": cpu.quant_matmul,
    "reference": reference.quant_matmul,
}

# What may be rounded on the way in, and for which weights.
ACTIVATIONS = {
    "float32": FORMATS,
    "bfloat16": ("bfloat16",),
    "int8": ("int8", "int4"),
}


def quant_matmul(
    x: Float[Array, "... K"],
    weight: PackedWeight,
    *,
    implementation: str = "auto",
    activations: str = "float32",
) -> Float[Array, "... N"]:
    """Multiply every row of x with a packed `[K, N]` weight; sums and result are float32.

    `activations="float32"` multiplies x as it is. `"bfloat16"` rounds x first, for bfloat16
    weights; `"int8"` rounds each group of a row (256 values where the weight has no groups) to
    eight bits, for int8 and int4 weights: half and a quarter of the arithmetic, which is what
    limits many rows.

    "auto" is "cpu" wherever the program is compiled for a CPU and the native library is there, and
    "xla" elsewhere. Differentiable in x and in the weight's floats, as if x had not been rounded.
    Under `vmap` the mapped axis of x becomes rows; mapped weights are multiplied one by one.

    Raises: KeyError for an implementation that is not in the table; ValueError when x, weight and
    activations do not go together; KernelUnavailable when "cpu" is asked for and cannot run.
    """
    _check(x, weight, activations)
    rows = x.reshape(math.prod(x.shape[:-1]), weight.num_in)
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        rows = rows.astype(jnp.float32)
    multiply = _differentiable(_choose(implementation), activations)
    return multiply(rows, weight).reshape(*x.shape[:-1], weight.num_out)


def _check(x: Array, weight: PackedWeight, activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations are one of {', '.join(ACTIVATIONS)}, not {activations!r}")
    if weight.format not in ACTIVATIONS[activations]:
        raise ValueError(
            f"{activations} activations need weights in {' or '.join(ACTIVATIONS[activations])},"
            f" not {weight.format}"
        )
    if x.ndim < 1 or x.shape[-1] != weight.num_in:
        raise ValueError(f"x has shape {x.shape}, the weight takes rows of {weight.num_in}")
    if weight.values.ndim != (3 if weight.format == "float32" else 4):
        raise ValueError(
            f"packed values have shape {weight.values.shape}: one matrix is multiplied at a time"
        )


def _choose(implementation: str) -> Callable[..., Any]:
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation]
    return _by_platform if native.available() else xla.quant_matmul


def _by_platform(x: Array, weight: PackedWeight, *, activations: str) -> Array:
    """Run the native kernel where the program is compiled for a CPU, XLA's product elsewhere."""
    return lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: cpu.quant_matmul(x, weight, activations=activations),
        default=lambda x, weight: xla.quant_matmul(x, weight, activations=activations),
    )


def _differentiable(run: Callable[..., Any], activations: str) -> Callable[..., Any]:
    """Give an implementation the derivative of the exact product, computed by XLA."""

    @jax.custom_jvp
    def multiply(x: Array, weight: PackedWeight) -> Array:
        return run(x, weight, activations=activations)

    def exact(x: Array, weight: PackedWeight) -> Array:
        return xla.quant_matmul(x, weight, activations="float32")

    def derivative(primals: tuple, tangents: tuple) -> tuple[Array, Any]:
        (x, weight), (dx, dweight) = primals, tangents
        terms = []
        if not isinstance(dx, SymbolicZero):
            terms.append(exact(dx, weight))
        is_zero = [isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(dweight)]
        if not all(is_zero):
            dweight = jax.tree.map(_instantiate, dweight)
            terms.append(jax.jvp(lambda w: exact(x, w), (weight,), (dweight,))[1])
        out = multiply(x, weight)
        return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)

    multiply.defjvp(derivative, symbolic_zeros=True)
    return multiply


def _instantiate(tangent: Any) -> Any:
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    if aval.dtype == float0:
        return np.zeros(aval.shape, float0)
    return jnp.zeros(aval.shape, aval.dtype)


__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "IMPLEMENTATIONS",
    "QUANTIZED",
    "PackedWeight",
    "dequantize",
    "pack",
    "pack_codes",
    "quant_matmul",
    "take_rows",
    "unpack",
]
