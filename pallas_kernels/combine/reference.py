"""The definition of correct: every part weighs as much as its share of the sum of weights."""

import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Float


def combine(
    outs: Float[Array, "parts *rows H W"],
    lses: Float[Array, "parts *rows H"],
    *,
    sinks: Float[Array, "..."] | None,
) -> tuple[Float[Array, "*rows H W"], Float[Array, "*rows H"]]:
    """Join parts the slow and obvious way; see the package for the contract."""
    lses = lses.astype(jnp.float32)
    terms = lses
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32), lses.shape[1:])
        terms = jnp.concatenate([lses, sink[None]])
    whole = logsumexp(terms, axis=0)
    share = jnp.exp(lses - jnp.where(jnp.isneginf(whole), 0.0, whole)[None])
    values = jnp.where(jnp.isneginf(lses)[..., None], 0.0, outs.astype(jnp.float32))
    return (share[..., None] * values).sum(0).astype(outs.dtype), whole
