"""The sampler: one fixed order for everything that happens between logits and a token.

float32 -> token mask -> allowed ids -> bad words -> min_tokens -> bias -> repetition penalty ->
frequency and presence penalty -> greedy: the largest, lowest id first
                               -> others: temperature -> min_p -> top_k -> top_p -> draw

A forced token is taken instead of the drawn one, at the last moment and whatever bans it.

A row's result depends on that row alone. Work that few rows need sits in branches which are taken
when any row needs it and leave the other rows untouched; greedy rows and plain temperature never
sort.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.errors import InvalidSampling
from inferjax.sampling.arrays import (
    Sampled,
    SampleState,
    Sampling,
    forced_tokens,
    greedy_rows,
)
from inferjax.sampling.blocks import block_argmax, block_max, broken_rows
from inferjax.sampling.draw import draw_plain, uniforms
from inferjax.sampling.filters import draw_filtered, filtered_rows
from inferjax.sampling.logprobs import (
    hide_padding,
    ids_logprobs,
    log_normalizer,
    pick_values,
    top_tokens,
)
from inferjax.sampling.masks import constrain, constrained_rows
from inferjax.sampling.penalties import penalize, penalized_rows
from inferjax.sampling.status import Status
from inferjax.sampling.validity import check_shapes, invalid_rows, neutral_rows
from pallas_kernels.unbatched import any_row


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    state: SampleState,
    *,
    candidates: int = 256,
    top_logprobs: int = 0,
    vocab_size: int | None = None,
) -> Sampled:
    """Choose one token per row.

    candidates: how many of the largest logits the filters look at before they look at all.
    top_logprobs: the most likely tokens that a row can ask for. vocab_size: ids from here on are
    padding, which has no probability and is never drawn.

    Raises: ShapeError, InvalidSampling (for the static arguments; bad rows get a status bit).
    """
    check_shapes(logits, sampling, state)
    num_ids = logits.shape[1] if vocab_size is None else min(vocab_size, logits.shape[1])
    _check_static(candidates, top_logprobs, num_ids)
    raw = hide_padding(logits.astype(jnp.float32), vocab_size)
    forced = forced_tokens(state)
    status = _row_status(raw, sampling, num_ids)
    status |= jnp.where(forced >= num_ids, int(Status.BAD_TOKEN), 0)
    forced = jnp.where(status == 0, forced, -1)
    sampling = neutral_rows(sampling, status != 0)
    allowed = _constrained(raw, sampling, state, status != 0)
    # A row whose constraints leave nothing is drawn from the raw logits, greedily.
    emptied = (status == 0) & (block_max(allowed) == -jnp.inf)
    status = jnp.where(emptied, status | int(Status.ALL_MASKED), status)
    fallback = lax.cond(any_row(emptied), block_argmax, _zeros, raw)
    forced = jnp.where(emptied, -1, forced)
    choose = functools.partial(_choose, num_ids=num_ids, candidates=candidates)
    tokens, sampled_logprobs = choose(allowed, sampling, state, emptied, forced)
    tokens = jnp.where(emptied, fallback, tokens)
    top_ids = top_tokens(raw, top_logprobs, sampling.num_top)
    return Sampled(
        tokens=tokens,
        sampled_logprobs=sampled_logprobs,
        top_ids=top_ids,
        status=status,
        **raw_logprobs(raw, log_normalizer(raw), tokens, top_ids, sampling.logprob_ids),
    )


def raw_logprobs(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, " B"],
    tokens: Int[Array, " B"],
    top_ids: Int[Array, "B n"],
    chosen_ids: Int[Array, "B Q"],
) -> dict[str, Array]:
    """Return those fields of `Sampled` that are raw log-probabilities."""
    return {
        "logprobs": pick_values(logits, tokens) - normalizer,
        "top_logprobs": ids_logprobs(logits, top_ids, normalizer),
        "chosen_logprobs": ids_logprobs(logits, chosen_ids, normalizer),
    }


def processed_logits(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState
) -> Float[Array, "B V"]:
    """Apply masks, bias and penalties, in the chain's order; finite values stay finite."""
    allowed = penalize(constrain(logits, sampling, state), sampling, state)
    return jnp.minimum(allowed, jnp.finfo(jnp.float32).max)


def _constrained(
    raw: Array, sampling: Sampling, state: SampleState, broken: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    rows = constrained_rows(sampling, state) | penalized_rows(sampling)

    def apply(values: Array) -> Array:
        finite = jnp.where(jnp.isnan(values) | (values == jnp.inf), -jnp.inf, values)
        values = jnp.where(broken[:, None], finite, values)
        return jnp.where(rows[:, None], processed_logits(values, sampling, state), values)

    return lax.cond(any_row(rows | broken), apply, lambda values: values, raw)


def _choose(
    logits: Array,
    sampling: Sampling,
    state: SampleState,
    emptied: Bool[Array, " B"],
    forced: Int[Array, " B"],
    *,
    num_ids: int,
    candidates: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    greedy = greedy_rows(sampling) | emptied
    filtered = ~greedy & filtered_rows(sampling, num_ids)
    plain = ~greedy & ~filtered
    batch = logits.shape[0]
    uniform = lax.cond(any_row(~greedy), uniforms, lambda _: jnp.zeros(batch), state)
    plain_tokens, plain_logprobs = draw_plain(logits, sampling, uniform, plain, forced)
    tokens, logprobs = draw_filtered(logits, sampling, uniform, filtered, candidates, forced)
    best = block_argmax(logits)
    likeliest = jnp.where(forced >= 0, forced, best)
    certain = jnp.where(likeliest == best, 0.0, -jnp.inf)
    tokens = jnp.where(filtered, tokens, jnp.where(plain, plain_tokens, likeliest))
    logprobs = jnp.where(filtered, logprobs, jnp.where(plain, plain_logprobs, certain))
    return tokens, logprobs


def _row_status(raw: Array, sampling: Sampling, num_ids: int) -> Int[Array, " B"]:
    status = jnp.where(broken_rows(raw), int(Status.NAN_LOGITS), 0)
    status |= jnp.where(invalid_rows(sampling, num_ids), int(Status.BAD_SAMPLING), 0)
    return status.astype(jnp.int32)


def _zeros(logits: Array) -> Int[Array, " B"]:
    return jnp.zeros(logits.shape[0], jnp.int32)


def _check_static(candidates: int, top_logprobs: int, num_ids: int) -> None:
    if candidates < 1:
        raise InvalidSampling(
            f"candidates is {candidates}", why="the filters need at least 1", fix="use 64 to 1024"
        )
    if not 0 <= top_logprobs <= num_ids:
        raise InvalidSampling(
            f"top_logprobs is {top_logprobs}",
            why=f"the vocabulary has {num_ids} ids",
            fix=f"ask for 0 to {num_ids}",
        )
