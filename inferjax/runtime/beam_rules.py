"""The rules of beam search: from one step's logits to the beams that live on and those that end.

Letters: B prompts, W beams per prompt, C candidates per prompt, T places for new tokens.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from inferjax.config import Exec
from inferjax.pytree import pytree
from inferjax.runtime.tiles import map_tiles
from inferjax.sampling import Status
from inferjax.sampling.blocks import broken_rows, largest
from inferjax.sampling.logprobs import log_normalizer

EarlyStopping = bool | Literal["never"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is decided before the search; `beam_search` says what it means."""

    num_beams: int
    max_new_tokens: int
    early_stopping: EarlyStopping
    eos_ids: tuple[int, ...]

    @property
    def num_candidates(self) -> int:
        """C: enough that W of them go on even if every beam could end in every way."""
        return self.num_beams * max(2, 1 + len(self.eos_ids))


@pytree
class Beams:
    """Finished continuations of each prompt, the best first.

    `scores` are sums of log-probabilities divided by `lengths ** length_penalty`; `lengths` counts
    the end id. After the end tokens are the pad id and log-probabilities 0. `status` holds `Status`
    bits, 0 for good rows. A place that was never taken, in a bad row, has length 0, score -inf.
    """

    tokens: Int[Array, "B n T"]
    logprobs: Float[Array, "B n T"]
    scores: Float[Array, "B n"]
    lengths: Int[Array, "B n"]
    status: Int[Array, " B"]


@pytree
class Search:
    """Between two steps: W live beams per prompt, the likeliest first, and the W best that ended.

    `sums` are the live beams' log-probabilities, -inf for one not in use; `parents` says which live
    beam of the step before each one continues. A prompt that is not `open` is decided.
    """

    tokens: Int[Array, "B W T"]
    logprobs: Float[Array, "B W T"]
    sums: Float[Array, "B W"]
    parents: Int[Array, "B W"]
    open: Bool[Array, " B"]
    ended: Beams


@pytree
class Candidates:
    """Continuations of the live beams by one token, the likeliest first."""

    tokens: Int[Array, "B C T"]
    logprobs: Float[Array, "B C T"]
    sums: Float[Array, "B C"]
    parents: Int[Array, "B C"]
    ends: Bool[Array, "B C"]


def empty_search(status: Int[Array, " B"], rules: Rules, pad: int) -> Search:
    """Return one live beam per prompt, and nothing finished."""
    shape = (status.shape[0], rules.num_beams)
    nothing = jnp.full(shape, -jnp.inf, jnp.float32)
    tokens = jnp.full((*shape, rules.max_new_tokens), pad, jnp.int32)
    logprobs = jnp.zeros(tokens.shape, jnp.float32)
    ended = Beams(
        tokens=tokens,
        logprobs=logprobs,
        scores=nothing,
        lengths=jnp.zeros(shape, jnp.int32),
        status=status,
    )
    return Search(
        tokens=tokens,
        logprobs=logprobs,
        sums=nothing.at[:, 0].set(0.0),
        parents=jnp.zeros(shape, jnp.int32),
        open=status == 0,
        ended=ended,
    )


def select(
    step: Int[Array, ""],
    logits: Float[Array, "R V"],
    search: Search,
    length_penalty: Float[Array, ""],
    rules: Rules,
    exec: Exec,
) -> Search:
    """Fill place `step` from the live beams' logits, R = B * W."""
    search = _close_broken(logits, search)
    found = _candidates(step, logits, search, rules, exec)
    search = _finish(step, found, search, length_penalty)
    search = _live_on(found, search)
    return _close_decided(step, search, length_penalty, rules)


def pick(values: Array, index: Int[Array, "B n"]) -> Array:
    """Return, of [B, N, ...], each row's values at its indices [B, n, ...]."""
    index = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1)


def _close_broken(logits: Float[Array, "R V"], search: Search) -> Search:
    """Close the prompts with a beam whose logits are not finite, and say so."""
    found = broken_rows(logits).reshape(search.sums.shape)
    broken = search.open & jnp.any(found, axis=1)
    status = search.ended.status | jnp.where(broken, int(Status.NAN_LOGITS), 0)
    ended = dataclasses.replace(search.ended, status=status)
    return dataclasses.replace(search, open=search.open & ~broken, ended=ended)


def _candidates(
    step: Int[Array, ""], logits: Float[Array, "R V"], search: Search, rules: Rules, exec: Exec
) -> Candidates:
    batch, count = search.sums.shape[0], rules.num_candidates
    # The C likeliest of a prompt are among the C likeliest of each of its beams.
    ids, logprobs = _likeliest(logits, count, exec)
    sums = jnp.repeat(search.sums, count, axis=1) + logprobs.reshape(batch, -1)
    sums, index = largest(sums, count)
    parents = index // count
    tokens = pick(ids.reshape(batch, -1), index)
    logprobs = pick(logprobs.reshape(batch, -1), index)
    ends = jnp.isin(tokens, jnp.asarray(rules.eos_ids, jnp.int32))
    return Candidates(
        tokens=pick(search.tokens, parents).at[:, :, step].set(tokens),
        logprobs=pick(search.logprobs, parents).at[:, :, step].set(logprobs),
        sums=sums,
        parents=parents,
        ends=ends | (step + 1 >= rules.max_new_tokens),
    )


def _likeliest(
    logits: Float[Array, "R V"], count: int, exec: Exec
) -> tuple[Int[Array, "R C"], Float[Array, "R C"]]:
    """Return each row's likeliest ids and their log-probabilities."""

    def rows(_: None, logits: Array) -> tuple[None, tuple[Array, Array]]:
        values, ids = largest(logits, count)
        return None, (ids, values - log_normalizer(logits)[:, None])

    return map_tiles(rows, None, logits, exec.tile)[1] if exec.exact else rows(None, logits)[1]


def _finish(
    step: Int[Array, ""], found: Candidates, search: Search, length_penalty: Float[Array, ""]
) -> Search:
    """Give the finished places to the best of those that hold one and those that end now.

    Only the W likeliest candidates may end: the others are there to live on.
    """
    ended, num_beams = search.ended, search.sums.shape[1]
    first = jnp.arange(found.sums.shape[1], dtype=jnp.int32)[None] < num_beams
    ends = found.ends & first & search.open[:, None]
    scores = jnp.where(ends, found.sums / _norm(step + 1, length_penalty), -jnp.inf)
    lengths = jnp.where(ends, step + 1, 0)
    scores, index = largest(_join(ended.scores, scores), num_beams)
    ended = Beams(
        tokens=pick(_join(ended.tokens, found.tokens), index),
        logprobs=pick(_join(ended.logprobs, found.logprobs), index),
        scores=scores,
        lengths=pick(_join(ended.lengths, lengths), index),
        status=ended.status,
    )
    return dataclasses.replace(search, ended=ended)


def _join(held: Array, new: Array) -> Array:
    return jnp.concatenate([held, new], axis=1)


def _live_on(found: Candidates, search: Search) -> Search:
    """Keep the W likeliest candidates that do not end."""
    sums, index = largest(jnp.where(found.ends, -jnp.inf, found.sums), search.sums.shape[1])
    return dataclasses.replace(
        search,
        tokens=pick(found.tokens, index),
        logprobs=pick(found.logprobs, index),
        sums=sums,
        parents=pick(found.parents, index),
    )


def _close_decided(
    step: Int[Array, ""], search: Search, length_penalty: Float[Array, ""], rules: Rules
) -> Search:
    """Close the prompts whose finished places are taken, by the rule of `early_stopping`."""
    over = jnp.all(search.ended.lengths > 0, axis=1)
    if rules.early_stopping is not True:
        length = step + 1
        if rules.early_stopping == "never":
            length = jnp.where(length_penalty > 0, jnp.int32(rules.max_new_tokens), length)
        reachable = search.sums[:, 0] / _norm(length, length_penalty)
        over &= reachable <= search.ended.scores[:, -1]
    return dataclasses.replace(search, open=search.open & ~over)


def _norm(length: Int[Array, ""], length_penalty: Float[Array, ""]) -> Float[Array, ""]:
    return length.astype(jnp.float32) ** length_penalty
