"""Matmul of row tiles, each with the weight of its own group: the expert matmul of a MoE."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "N R D"],
    weights: Float[Array, "E D F"],
    tile_group: Int[Array, " N"],
    num_live: Int[Array, ""],
    *,
    implementation: str = "auto",
) -> Float[Array, "N R F"]:
    """Multiply tile n by `weights[tile_group[n]]`; tiles from `num_live` on are skipped and zero.

    Every tile is a matmul of one fixed shape, so a row's result does not depend on its neighbours.
    Sums are float32; the result has x's dtype. Differentiable in x and weights.

    Raises: KeyError for an implementation that is not in the table.
    """
    chosen = "xla" if implementation == "auto" else implementation
    return IMPLEMENTATIONS[chosen](x, weights, tile_group, num_live)
