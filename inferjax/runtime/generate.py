"""`generate`: prompts in, sampled tokens out, as one pure function for the caller's own jit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.kv.cache import KVCache, copy_pages, page_size_of, row_tables
from inferjax.models.decoder import check_head
from inferjax.params import Params
from inferjax.pytree import pytree
from inferjax.runtime.arguments import (
    as_lengths,
    as_tokens,
    check_context,
    check_count,
    check_ids,
    check_kinds,
    longest,
)
from inferjax.runtime.inputs import DecodeState, StepInputs, init_state, input_status
from inferjax.runtime.passes import last_rows, logits_of, make_cache, run_paged
from inferjax.runtime.requests import forced_of, keys_of, sampling_of
from inferjax.runtime.steps import any_bits, decode_loop, draw
from inferjax.sampling import Sampled, Sampling, SamplingParams, Status
from inferjax.sharding import automatic, rows_like


@pytree
class Generation:
    """Sampled continuations: [B, T], or [B, n, T] when `num_samples` was given.

    After a row's end tokens are the pad id and log-probabilities 0; `lengths` counts the stop id.
    `logprobs` are raw and equal to `score`; `sampled_logprobs` are under the distribution drawn
    from. `top_ids` and `top_logprobs` have a last axis of `exec.top_logprobs`, `chosen_logprobs`
    one value for each of the sampling's `logprob_token_ids`, raw as well. `status` holds `Status`
    bits, 0 for good rows.
    """

    tokens: Int[Array, "*rows T"]
    logprobs: Float[Array, "*rows T"]
    sampled_logprobs: Float[Array, "*rows T"]
    lengths: Int[Array, "*rows"]
    status: Int[Array, "*rows"]
    top_ids: Int[Array, "*rows T n"]
    top_logprobs: Float[Array, "*rows T n"]
    chosen_logprobs: Float[Array, "*rows T Q"]


def generate(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    lengths: Any = None,
    *,
    key: Any = None,
    max_new_tokens: int,
    sampling: Sampling | SamplingParams | None = None,
    num_samples: int | None = None,
    exec: Exec = Exec(),
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens.

    `tokens` are padded on the right, `lengths` says where each prompt ends. `key` is one key or one
    per row; a token's randomness is fold_in(fold_in(row key, sample index), position), and without
    a key the sampling must be greedy, which is the default. Rows of `Sampling` without EOS ids stop
    at the model's; `ignore_eos` keeps them going. With `num_samples` each prompt is
    prefilled once and its full pages are shared by all its samples. Memory: a cache for
    B * (S + num_samples * max_new_tokens) tokens lives inside the call.

    Raises: ShapeError, InvalidInput, RequestTooLong, InvalidSampling, UnsupportedModel.
    """
    check_kinds(params, config, exec)
    check_head(config, "vocabulary")
    tokens = as_tokens(tokens)
    lengths = as_lengths(lengths, tokens)
    check_ids(tokens, lengths, config)
    check_count("max_new_tokens", max_new_tokens, 1)
    if num_samples is not None:
        check_count("num_samples", num_samples, 1)
    check_context(longest(tokens, lengths) + max_new_tokens, config)
    batch = tokens.shape[0]
    rows = sampling_of(sampling, batch, config, exec)
    forced = forced_of(sampling, batch, max_new_tokens)
    keys = keys_of(key, sampling, batch)
    return _generate(
        params,
        tokens,
        lengths,
        keys,
        rows,
        forced,
        config=config,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        exec=exec,
    )


@jax.jit(static_argnames=("config", "max_new_tokens", "num_samples", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _generate(
    params: Params,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    keys: Array,
    sampling: Sampling,
    forced: Int[Array, "B F"],
    *,
    config: ModelConfig,
    max_new_tokens: int,
    num_samples: int | None,
    exec: Exec,
) -> Generation:
    copies = num_samples or 1
    logits, status, cache, prompt_table = prefill_prompts(
        params, config, tokens, lengths, num_samples, max_new_tokens, exec
    )
    table = prompt_table
    if num_samples is not None:
        cache, table = share_pages(cache, prompt_table, lengths, num_samples, max_new_tokens)
    limit = jnp.minimum(sampling.max_tokens, jnp.int32(max_new_tokens))
    sampling = dataclasses.replace(sampling, max_tokens=limit)
    rows = (tokens, lengths, keys, sampling, forced, status, logits)
    tokens, lengths, keys, sampling, forced, status, logits = jax.tree.map(
        lambda x: jnp.repeat(x, copies, axis=0), rows
    )
    state = init_state(
        tokens,
        lengths,
        keys=keys,
        sampling=sampling,
        block_tables=(table,) * len(cache.groups),
        room=max_new_tokens,
        sample_index=jnp.arange(lengths.shape[0], dtype=jnp.int32) % copies,
        forced=forced,
    )
    state = dataclasses.replace(state, done=state.done | (status != 0))
    first, state = draw(logits, config, state, exec)
    rest, state, _ = decode_loop(params, config, cache, state, max_new_tokens - 1, exec)
    return _result(first, rest, state, status, num_samples)


def prefill_prompts(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    num_samples: int | None,
    max_new_tokens: int,
    exec: Exec,
) -> tuple[Float[Array, "B V"], Int[Array, " B"], KVCache, Int[Array, "B M"]]:
    """Run prompts into a cache of their own; return their last logits and `Status` bits with it.

    The last value is the prompts' block table; the cache also has the pages that `num_samples` of
    each prompt need for `max_new_tokens`.
    """
    cache, prompt_table = _prompt_cache(
        params, config, tokens.shape, num_samples, max_new_tokens, exec
    )
    inputs = StepInputs(
        tokens=tokens,
        lengths=lengths,
        starts=jnp.zeros_like(lengths),
        block_tables=(prompt_table,) * len(cache.groups),
    )
    status = input_status(inputs, cache, config)
    status |= jnp.where(lengths < 1, int(Status.EMPTY_PROMPT), 0)
    hidden, cache = prefill_chunks(params, config, cache, inputs, exec)
    return logits_of(params, config, hidden, exec), status, cache, prompt_table


def prefill_chunks(
    params: Params, config: ModelConfig, cache: KVCache, inputs: StepInputs, exec: Exec
) -> tuple[Float[Array, "B D"], KVCache]:
    """Prefill whole prompts, `exec.prefill_chunk` tokens at a time; return last hidden states.

    Exact mode runs its own tiles and needs no chunks.
    """
    batch, width = inputs.tokens.shape
    chunk = exec.prefill_chunk
    if exec.exact or width <= chunk:
        hidden, cache, _ = run_paged(params, config, cache, inputs, exec)
        return last_rows(hidden, inputs.lengths), cache
    num_chunks = -(-width // chunk)
    padded = jnp.pad(inputs.tokens, ((0, 0), (0, num_chunks * chunk - width)))

    def step(i: Array, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        last, cache = carry
        part = StepInputs(
            tokens=lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1),
            lengths=jnp.clip(inputs.lengths - i * chunk, 0, chunk),
            starts=inputs.starts + i * chunk,
            block_tables=inputs.block_tables,
        )
        hidden, cache, _ = run_paged(params, config, cache, part, exec)
        return jnp.where((part.lengths > 0)[:, None], last_rows(hidden, part.lengths), last), cache

    start = jnp.zeros((batch, config.model_dim), params.embed.dtype)
    return lax.fori_loop(0, num_chunks, step, (start, cache))


def _prompt_cache(
    params: Params,
    config: ModelConfig,
    shape: tuple[int, ...],
    num_samples: int | None,
    max_new_tokens: int,
    exec: Exec,
) -> tuple[KVCache, Int[Array, "B M"]]:
    """Allocate pages; return the cache and the prompts' block tables."""
    (batch, width), size = shape, exec.page_size
    tokens = width if num_samples is not None else width + max_new_tokens
    per_row = -(-tokens // size)
    own = 0 if num_samples is None else batch * num_samples * _own_pages(max_new_tokens, size)
    cache = make_cache(params, config, num_pages=1 + batch * per_row + own, exec=exec)
    return cache, row_tables(batch, per_row)


def _own_pages(max_new_tokens: int, page_size: int) -> int:
    """Return the pages a sample may need beyond its prompt's full pages."""
    return -(-(max_new_tokens + page_size - 1) // page_size)


def share_pages(
    cache: KVCache,
    prompt_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    num_samples: int,
    max_new_tokens: int,
) -> tuple[KVCache, Int[Array, "R N"]]:
    """Give every sample the prompt's full pages and pages of its own, the first one a copy.

    Page j of a sample is the prompt's while j < length // page_size; the prompt's last, partly
    filled page is copied, because the samples write different tokens behind it.
    """
    batch, prompt_pages = prompt_table.shape
    size = page_size_of(cache)
    own_pages = _own_pages(max_new_tokens, size)
    full = (lengths // size)[:, None, None]
    sample = jnp.arange(batch * num_samples, dtype=jnp.int32).reshape(batch, num_samples, 1)
    base = 1 + batch * prompt_pages + sample * own_pages
    page = jnp.arange(prompt_pages + own_pages, dtype=jnp.int32)[None, None]
    shared = jnp.take(prompt_table, jnp.minimum(page[0, 0], prompt_pages - 1), axis=1)[:, None]
    own = base + jnp.clip(page - full, 0, own_pages - 1)
    table = jnp.where(page < full, shared, own).reshape(batch * num_samples, -1)
    partial = jnp.take_along_axis(prompt_table, jnp.minimum(full[:, 0], prompt_pages - 1), axis=1)
    source = jnp.repeat(partial[:, 0], num_samples)
    return copy_pages(cache, source, base.reshape(-1)), table


def _result(
    first: Sampled, rest: Sampled, state: DecodeState, status: Array, num_samples: int | None
) -> Generation:
    drawn = jax.tree.map(lambda a, b: jnp.concatenate([a[:, None], b], axis=1), first, rest)
    result = Generation(
        tokens=drawn.tokens,
        logprobs=drawn.logprobs,
        sampled_logprobs=drawn.sampled_logprobs,
        lengths=state.sample.history_len - state.sample.prompt_len,
        status=any_bits(drawn.status) | status,
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
        chosen_logprobs=drawn.chosen_logprobs,
    )
    if num_samples is None:
        return result
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // num_samples, num_samples, *x.shape[1:]), result
    )
