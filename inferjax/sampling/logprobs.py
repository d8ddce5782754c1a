"""Raw log-probabilities: the one definition that sampling and scoring share."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.sampling.blocks import block_max, block_sum, largest
from pallas_kernels.unbatched import any_row


def token_logprobs(
    logits: Float[Array, "*lead V"], tokens: Int[Array, " *lead"], *, vocab_size: int | None = None
) -> Float[Array, " *lead"]:
    """Return the log-softmax of the logits at `tokens`, computed in float32; differentiable.

    Ids from `vocab_size` on are padding and take no probability.
    """
    hidden = hide_padding(logits.astype(jnp.float32), vocab_size)
    return pick_values(hidden, tokens) - log_normalizer(hidden)


def top_tokens(
    logits: Float[Array, "B V"], count: int, wanted: Int[Array, " B"]
) -> Int[Array, "B n"]:
    """Return each row's `wanted` most likely ids, the lower first in ties, then -1, `count` in all.

    Nothing is searched where no row wants any.
    """
    nothing = jnp.full((logits.shape[0], count), -1, jnp.int32)
    if count == 0:
        return nothing
    found = lax.cond(any_row(wanted > 0), lambda x: largest(x, count)[1], lambda _: nothing, logits)
    return jnp.where(jnp.arange(count, dtype=jnp.int32)[None] < wanted[:, None], found, -1)


def ids_logprobs(
    logits: Float[Array, "B V"], ids: Int[Array, "B n"], normalizer: Float[Array, " B"]
) -> Float[Array, "B n"]:
    """Return the log-probabilities of several ids a row, 0 for what is no id."""
    values = jnp.take_along_axis(logits, ids, axis=1, mode="clip")
    inside = (ids >= 0) & (ids < logits.shape[1])
    return jnp.where(inside, values - normalizer[:, None], 0.0)


def log_normalizer(logits: Float[Array, "*lead V"]) -> Float[Array, " *lead"]:
    """Return the log of the sum of exponentials of each row."""
    top = jax.lax.stop_gradient(block_max(logits))
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    return shift + jnp.log(block_sum(jnp.exp(logits - shift[..., None])))


def pick_values(values: Array, tokens: Int[Array, " *lead"]) -> Array:
    """Return each row's value, of [..., V], at its token."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def hide_padding(
    logits: Float[Array, "*lead V"], vocab_size: int | None
) -> Float[Array, "*lead V"]:
    """Set the columns from `vocab_size` on to -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(real, logits.shape), logits, -jnp.inf)
