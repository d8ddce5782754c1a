"""Products of activations with weights packed in 32, 16, 8 or 4 bits."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import native
from pallas_kernels.quant_matmul import cpu, reference, xla
from pallas_kernels.quant_matmul.checks import ACTIVATIONS, check_product
from pallas_kernels.quant_matmul.derivative import differentiable
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


def quant_matmul(
    x: Float[Array, "... K"],
    weight: PackedWeight,
    *,
    implementation: str = "auto",
    activations: str = "float32",
) -> Float[Array, "... N"]:
    """Multiply every row of x with a packed `[K, N]` weight; sums and result are float32.

    `activations="float32"` multiplies x as it is (with AVX-512, int8 and int4 weights: to 2^-23 of
    the largest in its group, the precision of a float32 sum; an infinity makes its row NaN).
    `"bfloat16"` rounds x first, for bfloat16 weights; `"int8"` rounds each group of a row (256
    values where the weight has no groups) to eight bits, for int8 and int4 weights: half and a
    quarter of the arithmetic, which is what limits many rows.

    "auto" is "cpu" wherever the program is compiled for a CPU and the native library is there, and
    "xla" elsewhere. Differentiable in x and in the weight's floats, as if x had not been rounded.
    Under `vmap` the mapped axis of x becomes rows; mapped weights are multiplied one by one.

    Raises: KeyError for an implementation that is not in the table; ValueError when x, weight and
    activations do not go together; KernelUnavailable when "cpu" is asked for and cannot run.
    """
    check_product(x, weight, activations)
    rows = x.reshape(math.prod(x.shape[:-1]), weight.num_in)
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        rows = rows.astype(jnp.float32)
    run = functools.partial(_choose(implementation), activations=activations)
    multiply = differentiable(run, _exact)
    return multiply(rows, weight).reshape(*x.shape[:-1], weight.num_out)


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


def _exact(x: Array, weight: PackedWeight) -> Array:
    return xla.quant_matmul(x, weight, activations="float32")


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
