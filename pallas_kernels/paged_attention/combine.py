"""Joins parts of one attention that were computed apart, each over a share of the keys."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

# Where no key was seen. Masked scores are far below, so that their weights are exactly zero.
FLOOR = -1e20
LOG2E = math.log2(math.e)


def combine(
    sums: Float[Array, "splits *rows W"],
    peaks: Float[Array, "splits *rows"],
    totals: Float[Array, "splits *rows"],
    sinks: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "*rows W"], Float[Array, "*rows"]]:
    """Return weighted values and the logarithm of the sum of weights.

    A part is its weighted values, its largest score times log2(e) (`FLOOR` without keys), and the
    sum of its weights beside that. `sinks` broadcast to the rows and belong to the whole, not to a
    part: they are added here, once. Rows without keys return zeros; their logarithm is the sink, or
    -inf without one.
    """
    peak = peaks.max(axis=0)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32) * LOG2E, peak.shape)
        peak = jnp.maximum(peak, sinks)
    share = jnp.exp2(peaks - peak[None])
    total = (totals * share).sum(axis=0)
    if sinks is not None:
        total = total + jnp.exp2(sinks - peak)
    out = (sums * share[..., None]).sum(axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out, jnp.log(total) + peak * (1 / LOG2E)
