"""top_k, top_p and min_p, on the largest candidates of each row.

Tokens are ordered by logit, the lower id first among equals, so each filter keeps a prefix of that
order: `min_p` the weights of at least `min_p` times the largest, `top_k` the first k of those,
`top_p` the shortest prefix that reaches that share of what is left, crossing token included. The
draw inverts the running sum of the kept weights in the same order.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.sampling.arrays import Sampling
from inferjax.sampling.blocks import block_cumsum, block_sum, first_above, largest
from inferjax.sampling.draw import no_draw, scale
from inferjax.sampling.threshold import draw_by_threshold
from pallas_kernels.unbatched import any_row


def draw_filtered(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    uniform: Float[Array, " B"],
    rows: Bool[Array, " B"],
    candidates: int,
    forced: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw from the filtered distribution, if any of `rows` wants it.

    A row whose kept prefix may be longer than `candidates` is drawn from the whole row instead.
    Returns tokens and their log-probabilities, meaningless outside `rows`; a `forced` id, unless it
    is -1, is taken as if it had been drawn.
    """

    def draw(values: Array) -> tuple[Array, Array]:
        count = min(candidates, values.shape[1])
        tokens, logprobs, complete = _draw_sorted(values, sampling, uniform, count, forced)
        unsure = rows & ~complete
        whole_tokens, whole_logprobs = lax.cond(any_row(unsure), draw_whole, no_draw, values)
        tokens = jnp.where(unsure, whole_tokens, tokens)
        return tokens, jnp.where(unsure, whole_logprobs, logprobs)

    def draw_whole(values: Array) -> tuple[Array, Array]:
        return draw_by_threshold(values, sampling, uniform, forced)

    return lax.cond(any_row(rows), draw, no_draw, logits)


def filtered_rows(sampling: Sampling, vocab_size: int) -> Bool[Array, " B"]:
    """Return which rows have a filter; a `top_k` of the whole vocabulary is none."""
    has_top_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    return has_top_k | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)


def _draw_sorted(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    uniform: Float[Array, " B"],
    count: int,
    forced: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    """Draw among the `count` largest; also return whether the kept prefix is known to end there."""
    values, ids = largest(logits, count)
    top = values[:, 0]
    weights = jnp.exp(scale(values, top, sampling.temperature))
    all_weights = jnp.exp(scale(logits, top, sampling.temperature))
    running, kept, complete = _keep_prefix(weights, sampling, all_weights)
    mass = jnp.max(jnp.where(kept, running, 0.0), axis=1)
    index = first_above(running, uniform * mass, kept)[:, None]
    chosen = jnp.take_along_axis(weights, index, axis=1)[:, 0]
    tokens = jnp.take_along_axis(ids, index, axis=1)[:, 0]
    found = jnp.max(jnp.where(kept & (ids == forced[:, None]), weights, 0.0), axis=1)
    tokens = jnp.where(forced >= 0, forced, tokens)
    chosen = jnp.where(forced >= 0, found, chosen)
    return tokens, jnp.log(chosen) - jnp.log(mass), complete


def _keep_prefix(
    weights: Float[Array, "B C"], sampling: Sampling, all_weights: Float[Array, "B V"]
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"], Bool[Array, " B"]]:
    """Return running sums of the sorted `weights`, which of them are kept, and if those are all."""
    count, size = weights.shape[1], all_weights.shape[1]
    min_p, top_p = sampling.min_p[:, None], sampling.top_p[:, None]
    limit = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size)
    rank = jnp.broadcast_to(jnp.arange(count), weights.shape)
    rest = (weights >= min_p) & (rank < limit[:, None]) & (weights > 0.0)
    running = block_cumsum(jnp.where(rest, weights, 0.0))
    last = weights[:, -1]
    ends = (limit <= count) | (last < sampling.min_p) | (last == 0.0)
    beyond = block_sum(jnp.where(all_weights >= min_p, all_weights, 0.0))
    goal = sampling.top_p * jnp.where(ends, running[:, -1], beyond)
    before = jnp.pad(running[:, :-1], ((0, 0), (1, 0)))
    kept = rest & ((before < goal[:, None]) | (top_p >= 1.0))
    crossed = (limit == size) & (sampling.top_p < 1.0) & (running[:, -1] >= goal)
    return running, kept, ends | crossed
