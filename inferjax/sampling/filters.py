"""top_k, top_p and min_p, on the largest candidates of each row.

Tokens are ordered by logit, the lower id first among equals, so each filter keeps a prefix of that
order: `min_p` the weights of at least `min_p` times the largest, `top_k` the first k of those,
`top_p` the shortest prefix that reaches that share of what is left, crossing token included.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.sampling.arrays import Sampling
from inferjax.sampling.blocks import block_cumsum, block_sum, invert_cdf, largest
from inferjax.sampling.draw import no_draw, scale
from inferjax.unbatched import any_row


def draw_filtered(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    uniform: Float[Array, " B"],
    rows: Bool[Array, " B"],
    candidates: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw from the filtered distribution in sorted order, if any of `rows` wants it.

    A row whose kept prefix may be longer than `candidates` is drawn from the whole sorted row
    instead. Returns tokens and their log-probabilities, meaningless outside `rows`.
    """
    size = logits.shape[1]

    def draw(values: Array) -> tuple[Array, Array]:
        tokens, logprobs, complete = _draw_sorted(values, sampling, uniform, min(candidates, size))
        unsure = rows & ~complete
        sure = (tokens, logprobs)
        if candidates >= size:
            return sure
        whole = lax.cond(any_row(unsure), draw_whole, no_draw, values)
        return jnp.where(unsure, whole[0], sure[0]), jnp.where(unsure, whole[1], sure[1])

    def draw_whole(values: Array) -> tuple[Array, Array]:
        return _draw_sorted(values, sampling, uniform, size)[:2]

    return lax.cond(any_row(rows), draw, no_draw, logits)


def filtered_rows(sampling: Sampling, vocab_size: int) -> Bool[Array, " B"]:
    """Return which rows have a filter; a `top_k` of the whole vocabulary is none."""
    has_top_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    return has_top_k | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)


def keep_prefix(
    weights: Float[Array, "B C"], sampling: Sampling, all_weights: Float[Array, "B V"]
) -> tuple[Float[Array, "B C"], Bool[Array, " B"]]:
    """Set to 0 the weights that the filters drop.

    weights: the largest C of the V in `all_weights`, in falling order, the first of them 1. Also
    returns whether the kept prefix is known to end within C.
    """
    count, size = weights.shape[1], all_weights.shape[1]
    min_p, top_p = sampling.min_p[:, None], sampling.top_p[:, None]
    limit = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size)
    rank = jnp.broadcast_to(jnp.arange(count), weights.shape)
    rest = jnp.where((weights >= min_p) & (rank < limit[:, None]), weights, 0.0)
    last = weights[:, -1]
    ends = (limit <= count) | (last < sampling.min_p) | (last == 0.0)
    beyond = block_sum(jnp.where(all_weights >= min_p, all_weights, 0.0))
    rest_mass = jnp.where(ends, block_sum(rest), beyond)
    running = block_cumsum(rest)
    before = jnp.pad(running[:, :-1], ((0, 0), (1, 0)))
    goal = sampling.top_p * rest_mass
    kept = jnp.where((before < goal[:, None]) | (top_p >= 1.0), rest, 0.0)
    crossed = (limit == size) & (sampling.top_p < 1.0) & (running[:, -1] >= goal)
    return kept, ends | crossed


def _draw_sorted(
    logits: Array, sampling: Sampling, uniform: Array, count: int
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    values, ids = largest(logits, count)
    top = values[:, 0]
    weights = jnp.exp(scale(values, top, sampling.temperature))
    all_weights = jnp.exp(scale(logits, top, sampling.temperature))
    kept, complete = keep_prefix(weights, sampling, all_weights)
    index, total = invert_cdf(kept, uniform)
    chosen = jnp.take_along_axis(kept, index[:, None], axis=1)[:, 0]
    tokens = jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]
    return tokens, jnp.log(chosen) - jnp.log(total), complete
