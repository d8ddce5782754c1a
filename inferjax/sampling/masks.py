"""Constraints on which ids may be drawn, and bias, each computed only when some row asks for it.

A feature whose id axis has length 0 leaves no trace in the compiled program.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.sampling.arrays import SampleState, Sampling, num_generated
from pallas_kernels.unbatched import any_row


def constrain(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Apply token mask, allowed ids, bad words, `min_tokens` and bias, in this order."""
    steps = (token_mask, allowed_ids, bad_words, min_tokens, logit_bias)
    for step in steps:
        logits = step(logits, sampling, state)
    return logits


def constrained_rows(sampling: Sampling, state: SampleState) -> Bool[Array, " B"]:
    """Return which rows have any constraint or bias."""
    has_words = jnp.any(sampling.bad_words[:, :, -1:] >= 0, axis=(1, 2))
    rows = has_words | _early_rows(sampling, state)
    rows |= _any_id(sampling.allowed_ids) | _any_id(sampling.bias_ids)
    return rows if sampling.token_mask is None else rows | _masked_rows(sampling.token_mask)


def token_mask(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Ban every id whose bit in the packed mask is clear; ids beyond the mask are banned too."""
    del state
    packed = sampling.token_mask
    if packed is None:
        return logits
    rows = _masked_rows(packed)

    def apply(values: Array) -> Array:
        bits = (packed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
        allowed = bits.reshape(bits.shape[0], -1)[:, : values.shape[1]] == 1
        missing = values.shape[1] - allowed.shape[1]
        allowed = jnp.pad(allowed, ((0, 0), (0, missing)))
        return jnp.where(rows[:, None] & ~allowed, -jnp.inf, values)

    return _when_any(rows, apply, logits)


def allowed_ids(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Ban every id outside the row's list, in rows that have one."""
    del state
    ids = sampling.allowed_ids
    if ids.shape[1] == 0:
        return logits
    rows = _any_id(ids)

    def apply(values: Array) -> Array:
        allowed = jnp.zeros(values.shape, jnp.bool_)
        allowed = allowed.at[_at(ids, values.shape[1])].set(True, mode="drop")
        return jnp.where(rows[:, None] & ~allowed, -jnp.inf, values)

    return _when_any(rows, apply, logits)


def bad_words(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Ban the last token of each bad sequence whose other tokens end the row's context."""
    words = sampling.bad_words
    if words.shape[1] == 0:
        return logits
    last = words[:, :, -1]

    def apply(values: Array) -> Array:
        banned = jnp.where(_prefix_matches(words[:, :, :-1], state), last, -1)
        return _ban(values, banned)

    return _when_any(_any_id(last), apply, logits)


def min_tokens(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Ban EOS and stop ids while a row has fewer than `min_tokens` output tokens."""
    ids = jnp.concatenate([sampling.eos_ids, sampling.stop_ids], axis=1)
    if ids.shape[1] == 0:
        return logits
    rows = _early_rows(sampling, state)
    return _when_any(rows, lambda values: _ban(values, jnp.where(rows[:, None], ids, -1)), logits)


def logit_bias(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Add each row's bias to its ids."""
    del state
    ids = sampling.bias_ids
    if ids.shape[1] == 0:
        return logits

    def apply(values: Array) -> Array:
        return values.at[_at(ids, values.shape[1])].add(sampling.bias, mode="drop")

    return _when_any(_any_id(ids), apply, logits)


def _when_any(rows: Bool[Array, " B"], apply: Callable[[Array], Array], logits: Array) -> Array:
    return lax.cond(any_row(rows), apply, lambda values: values, logits)


def _prefix_matches(prefix: Int[Array, "B W P"], state: SampleState) -> Bool[Array, "B W"]:
    batch, _, length = prefix.shape
    if length == 0 or state.history.shape[1] == 0:
        return jnp.all(prefix < 0, axis=2)
    index = state.history_len[:, None] - length + jnp.arange(length)[None, :]
    # A negative index is before the row's start; the -2 matches neither an id nor the padding.
    tail = state.history[jnp.arange(batch)[:, None], jnp.maximum(index, 0)]
    tail = jnp.where(index >= 0, tail, -2)
    return jnp.all((prefix < 0) | (prefix == tail[:, None, :]), axis=2)


def _ban(logits: Float[Array, "B V"], ids: Int[Array, "B N"]) -> Float[Array, "B V"]:
    return logits.at[_at(ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def _at(ids: Int[Array, "B N"], vocab_size: int) -> tuple[Array, Array]:
    # Negative indices would wrap around; `vocab_size` is out of range and dropped.
    return jnp.arange(ids.shape[0])[:, None], jnp.where(ids >= 0, ids, vocab_size)


def _any_id(ids: Int[Array, "B N"]) -> Bool[Array, " B"]:
    return jnp.any(ids >= 0, axis=1)


def _early_rows(sampling: Sampling, state: SampleState) -> Bool[Array, " B"]:
    ends = _any_id(sampling.eos_ids) | _any_id(sampling.stop_ids)
    return ends & (num_generated(state) < sampling.min_tokens)


def _masked_rows(packed: Array) -> Bool[Array, " B"]:
    return jnp.any(packed != jnp.uint32(0xFFFFFFFF), axis=1)
