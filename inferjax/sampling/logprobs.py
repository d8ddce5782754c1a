"""Raw log-probabilities: the one definition that sampling and scoring share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inferjax.sampling.blocks import block_max, block_sum, largest


def token_logprobs(
    logits: Float[Array, "*lead V"], tokens: Int[Array, " *lead"], *, vocab_size: int | None = None
) -> Float[Array, " *lead"]:
    """Return the log-softmax of the logits at `tokens`, computed in float32; differentiable.

    Ids from `vocab_size` on are padding and take no probability.
    """
    hidden = hide_padding(logits.astype(jnp.float32), vocab_size)
    return pick_logits(hidden, tokens) - log_normalizer(hidden)


def top_token_logprobs(
    logits: Float[Array, "B V"], count: int
) -> tuple[Int[Array, "B n"], Float[Array, "B n"]]:
    """Return the `count` most likely ids, the lower first in ties, and their log-probabilities."""
    if count == 0:
        rows = logits.shape[0]
        return jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0), jnp.float32)
    values, ids = largest(logits, count)
    return ids, values - log_normalizer(logits)[:, None]


def log_normalizer(logits: Float[Array, "*lead V"]) -> Float[Array, " *lead"]:
    """Return the log of the sum of exponentials of each row."""
    top = jax.lax.stop_gradient(block_max(logits))
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    return shift + jnp.log(block_sum(jnp.exp(logits - shift[..., None])))


def pick_logits(
    logits: Float[Array, "*lead V"], tokens: Int[Array, " *lead"]
) -> Float[Array, " *lead"]:
    """Return each row's value at its token."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


def hide_padding(
    logits: Float[Array, "*lead V"], vocab_size: int | None
) -> Float[Array, "*lead V"]:
    """Set the columns from `vocab_size` on to -inf."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(real, logits.shape), logits, -jnp.inf)
