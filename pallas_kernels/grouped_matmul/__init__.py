"""Matmul of row tiles, each with the matrix of its own group: the expert matmul of a MoE."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import native
from pallas_kernels.grouped_matmul import cpu, reference, xla
from pallas_kernels.quant_matmul.checks import check_product
from pallas_kernels.quant_matmul.derivative import differentiable
from pallas_kernels.quant_matmul.packed import PackedWeight

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cpu": cpu.grouped_matmul,
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: Float[Array, "E D F"] | PackedWeight,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
    *,
    implementation: str = "auto",
    activations: str = "float32",
) -> Float[Array, "N R F"]:
    """Multiply the first `tile_rows[n]` rows of tile n by `weights[tile_group[n]]`.

    All other rows are zero. A tile without rows costs nothing, and a matrix that no row needs is
    not read. Sums are float32; the result has x's dtype. A row's result does not depend on its
    neighbours: each tile is a matmul of one fixed shape, or, in the native kernel, each row is
    summed in one fixed order. Differentiable in x and in the weights' floats.

    A stack of packed matrices takes `activations`, as `quant_matmul` does. For it "auto" is "cpu"
    wherever the program is compiled for a CPU and the native library is there, and else "xla",
    which unpacks one matrix at a time. Plain arrays run as "xla" or "reference" only.

    Under `vmap` the native kernel has more tiles, and more matrices if weights are mapped; XLA
    skips a tile where no instance has rows in it.

    Raises: KeyError for an implementation that is not in the table; ValueError when x, weights and
    activations do not go together; KernelUnavailable when "cpu" is asked for and cannot run.
    """
    stack = weights.values if isinstance(weights, PackedWeight) else weights
    if not stack.shape[0]:
        raise ValueError(f"weights have shape {stack.shape}: a stack has at least one matrix")
    if not isinstance(weights, PackedWeight):
        if activations != "float32" or implementation == "cpu":
            raise ValueError("plain arrays are multiplied as they are, by 'xla' or 'reference'")
        run = IMPLEMENTATIONS["xla" if implementation == "auto" else implementation]
        return run(x, weights, tile_group, tile_rows, activations=activations)
    check_product(x, weights, activations, stacked=True)
    floats = x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(jnp.float32)
    run = functools.partial(_choose(implementation), activations=activations)
    multiply = differentiable(run, functools.partial(xla.grouped_matmul, activations="float32"))
    return multiply(floats, weights, tile_group, tile_rows).astype(x.dtype)


def _choose(implementation: str) -> Callable[..., Any]:
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation]
    return _by_platform if native.available() else xla.grouped_matmul


def _by_platform(*arrays: Any, activations: str) -> Array:
    """Run the native kernel where the program is compiled for a CPU, XLA's product elsewhere."""
    return lax.platform_dependent(
        *arrays,
        cpu=functools.partial(cpu.grouped_matmul, activations=activations),
        default=functools.partial(xla.grouped_matmul, activations=activations),
    )


__all__ = ["IMPLEMENTATIONS", "grouped_matmul"]
