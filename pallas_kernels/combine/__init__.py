"""Joining parts of one attention that were computed apart, each over a share of the keys."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.combine import reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.combine,
    "reference": reference.combine,
}


def combine(
    outs: Float[Array, "parts *rows H W"],
    lses: Float[Array, "parts *rows H"],
    *,
    sinks: Float[Array, "..."] | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "*rows H W"], Float[Array, "*rows H"]]:
    """Return attention over all keys, and the logarithms of its sums of weights.

    A part is what `paged_attention(..., lse=True)` returns without sinks. A part that saw no key
    (-inf) has no influence, NaN included. `sinks` broadcast to the rows and are one more logit of
    the whole, applied here and so once. Rows that saw nothing return zeros; their logarithm is the
    sink, or -inf without one. Sums are float32, the result has the dtype of `outs`.

    "auto" is "xla" on every device: XLA makes one or two fused kernels of it.

    Raises: KeyError for an implementation that is not in the table.
    """
    run = IMPLEMENTATIONS["xla" if implementation == "auto" else implementation]
    return run(outs, lses, sinks=sinks)


__all__ = ["IMPLEMENTATIONS", "combine"]
