"""Attention of ragged new tokens over a paged cache: decode, prefill and verification alike."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import cpu, reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cpu": cpu.paged_attention,
    "xla": xla.paged_attention,
    "reference": reference.paged_attention,
}


def paged_attention(
    q: Float[Array, "B T K G W"],
    pool: Float[Array, "L P K C S W"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    value_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T K G Hv"]:
    """Attend from T >= 1 query tokens per row to the row's pages.

    A query at position p sees cached positions j with j <= p, j < lengths[b] and, with a window,
    p - j < window. Queries with a negative position are padding and return zeros. Keys are plane 0
    of the pool, values the first `value_dim` columns of its last plane (a latent pool has one plane
    that is both). Whatever lies where no query of the row sees it, NaN included, has no influence:
    beyond the row's length, and in pages that its window has left.
    `sinks` are one extra logit per head without a value. Scores and sums are float32; the result
    has q's dtype.

    Raises: KeyError for an implementation that is not in the table.
    """
    chosen = "xla" if implementation == "auto" else implementation
    return IMPLEMENTATIONS[chosen](
        q,
        pool,
        layer,
        block_table,
        positions,
        lengths,
        scale=scale,
        value_dim=value_dim,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
