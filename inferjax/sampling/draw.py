"""Randomness: one uniform number per token, from the row's key, sample index and position."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.sampling.arrays import SampleState, Sampling
from inferjax.sampling.blocks import block_max, invert_cdf
from inferjax.sampling.logprobs import pick_values
from pallas_kernels.unbatched import any_row


def draw_plain(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    uniform: Float[Array, " B"],
    rows: Bool[Array, " B"],
    forced: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw from softmax(logits / temperature) in id order, if any of `rows` wants it.

    Returns tokens and their log-probabilities, meaningless outside `rows`; a `forced` id, unless it
    is -1, is taken as if it had been drawn.
    """

    def draw(values: Array) -> tuple[Array, Array]:
        scaled = scale(values, block_max(values), sampling.temperature)
        tokens, total = invert_cdf(jnp.exp(scaled), uniform)
        tokens = jnp.where(forced >= 0, forced, tokens)
        return tokens, pick_values(scaled, tokens) - jnp.log(total)

    return lax.cond(any_row(rows), draw, no_draw, logits)


def uniforms(state: SampleState) -> Float[Array, " B"]:
    """Return each row's random number in [0, 1)."""
    key = state.key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.vmap(_uniform)(key, state.sample_index, state.position)


def scale(
    values: Float[Array, "B N"], top: Float[Array, " B"], temperature: Float[Array, " B"]
) -> Float[Array, "B N"]:
    """Return log-weights over the temperature, shifted so that `top` has weight 1.

    Subtracting first keeps a tiny temperature from overflowing.
    """
    return (values - top[:, None]) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def no_draw(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return what the branch not taken returns."""
    batch = logits.shape[0]
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)


def _uniform(key: Array, sample_index: Array, position: Array) -> Array:
    folded = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    # The "rbg" generators draw different bits under vmap, where a row would depend on its slot.
    # Threefry does not, and for a threefry key this changes nothing.
    bits = jax.random.key_data(folded)[:2]
    return jax.random.uniform(jax.random.wrap_key_data(bits, impl="threefry2x32"))
