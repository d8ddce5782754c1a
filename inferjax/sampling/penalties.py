"""Penalties on tokens the row has already used, each computed only when some row asks for it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.sampling.arrays import SampleState, Sampling
from pallas_kernels.unbatched import any_row


def penalize(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Apply the repetition penalty, then the frequency and presence penalties."""
    logits = repetition(logits, sampling, state)
    return frequency_and_presence(logits, sampling, state)


def penalized_rows(sampling: Sampling) -> Bool[Array, " B"]:
    """Return which rows have a penalty."""
    return (sampling.repetition_penalty != 1.0) | _counted_rows(sampling)


def repetition(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Divide positive and multiply negative logits of every token of prompt and output.

    Source: CTRL, arXiv 1909.05858, section 4.1.
    """
    rows = sampling.repetition_penalty != 1.0

    def apply(values: Array) -> Array:
        penalty = sampling.repetition_penalty[:, None]
        seen = count_tokens(state, 0, values.shape[1]) > 0
        scaled = jnp.where(values > 0, values / penalty, values * penalty)
        return jnp.where(seen & rows[:, None], scaled, values)

    return lax.cond(any_row(rows), apply, lambda values: values, logits)


def frequency_and_presence(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Subtract a penalty per occurrence, and one for occurring at all, of output tokens only."""
    rows = _counted_rows(sampling)

    def apply(values: Array) -> Array:
        counts = count_tokens(state, state.prompt_len, values.shape[1])
        penalty = sampling.frequency_penalty[:, None] * counts.astype(jnp.float32)
        penalty += jnp.where(counts > 0, sampling.presence_penalty[:, None], 0.0)
        return jnp.where((counts > 0) & rows[:, None], values - penalty, values)

    return lax.cond(any_row(rows), apply, lambda values: values, logits)


def count_tokens(
    state: SampleState, start: Int[Array, " B"] | int, vocab_size: int
) -> Int[Array, "B V"]:
    """Count each id in the row's history from index `start` on; padding is not counted."""
    batch, length = state.history.shape
    index = jnp.broadcast_to(jnp.arange(length), (batch, length))
    first = jnp.broadcast_to(jnp.asarray(start), (batch,))[:, None]
    counted = (index >= first) & (index < state.history_len[:, None]) & (state.history >= 0)
    # An id of `vocab_size` is out of range, and so dropped by the scatter.
    ids = jnp.where(counted, state.history, vocab_size)
    counts = jnp.zeros((batch, vocab_size), jnp.int32)
    return counts.at[jnp.arange(batch)[:, None], ids].add(1, mode="drop")


def _counted_rows(sampling: Sampling) -> Bool[Array, " B"]:
    return (sampling.frequency_penalty != 0.0) | (sampling.presence_penalty != 0.0)
