"""Functions of whole sequences: logits, log-probabilities, activations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.kv.cache import KVCache, row_tables
from inferjax.layers.context import Dense
from inferjax.models.decoder import Taps, check_head, check_taps, run_layers
from inferjax.params import Params
from inferjax.runtime.arguments import (
    as_lengths,
    as_tokens,
    check_context,
    check_ids,
    check_kinds,
    longest,
)
from inferjax.runtime.inputs import make_inputs
from inferjax.runtime.passes import logits_of, logprobs_of, make_cache, run_paged
from inferjax.sharding import automatic, rows_like


def forward(
    params: Params, config: ModelConfig, tokens: Any, lengths: Any = None, *, exec: Exec = Exec()
) -> Float[Array, "B S V"]:
    """Return float32 logits of every position, without keeping a cache.

    Positions beyond a row's length hold no meaning; from a traced id outside the vocabulary on they
    are NaN. Differentiable, except in exact mode, which alone rounds to `exec.kv_dtype`.

    Raises: ShapeError, InvalidInput, RequestTooLong, UnsupportedModel.
    """
    tokens, lengths = checked(params, config, tokens, lengths, exec)
    check_head(config, "vocabulary")
    return _forward(params, tokens, lengths, config=config, exec=exec)


def score(
    params: Params, config: ModelConfig, tokens: Any, lengths: Any = None, *, exec: Exec = Exec()
) -> Float[Array, "B N"]:
    """Return the log-probability of each token given those before it: [B, S-1], float32.

    Column t is for token t+1; columns beyond a row's length are 0, and from a traced id outside the
    vocabulary on they are NaN. Logits exist for `exec.score_chunk` positions at a time.
    Differentiable with respect to params; in exact mode it takes the paged path, equals what
    generation reported bit for bit, and is not. By default there is no cache, so nothing is rounded
    to an `exec.kv_dtype` of fewer bits than generation rounded it to.

    Raises: ShapeError, InvalidInput, RequestTooLong, UnsupportedModel.
    """
    tokens, lengths = checked(params, config, tokens, lengths, exec)
    check_head(config, "vocabulary")
    return _score(params, tokens, lengths, config=config, exec=exec)


def activations(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    lengths: Any = None,
    *,
    taps: tuple[str, ...],
    exec: Exec = Exec(),
) -> Taps:
    """Return named activations [B, S, D] of a forward pass: "embed", "layers.<i>", "final".

    Raises: InvalidInput for an unknown name; ShapeError, RequestTooLong.
    """
    check_kinds(params, config, exec)
    taps = check_taps(taps, config)
    tokens, lengths = checked(params, config, tokens, lengths, exec)
    return _activations(params, tokens, lengths, config=config, exec=exec, taps=taps)


def checked(
    params: Any, config: Any, tokens: Any, lengths: Any, exec: Any
) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """Return the tokens and lengths of whole sequences, after every check that needs no trace.

    Raises: ShapeError, InvalidInput, RequestTooLong.
    """
    check_kinds(params, config, exec)
    tokens = as_tokens(tokens)
    lengths = as_lengths(lengths, tokens)
    check_ids(tokens, lengths, config)
    check_context(longest(tokens, lengths), config)
    return tokens, lengths


@jax.jit(static_argnames=("config", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _forward(params: Params, tokens: Array, lengths: Array, *, config: ModelConfig, exec: Exec):
    hidden, _ = final_hidden(params, config, tokens, lengths, exec)
    hidden = jnp.where(good_so_far(config, tokens, lengths)[:, :, None], hidden, jnp.nan)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = logits_of(params, config, flat, exec)
    return logits.reshape(*tokens.shape, -1)


@jax.jit(static_argnames=("config", "exec", "taps"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _activations(params, tokens, lengths, *, config, exec, taps):
    good = good_so_far(config, tokens, lengths)[:, :, None]
    seen = final_hidden(params, config, tokens, lengths, exec, taps)[1]
    return {name: jnp.where(good, x, jnp.nan) for name, x in seen.items()}


@jax.jit(static_argnames=("config", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _score(params: Params, tokens: Array, lengths: Array, *, config: ModelConfig, exec: Exec):
    hidden, _ = final_hidden(params, config, tokens, lengths, exec)
    values = next_logprobs(params, config, hidden, tokens, exec)
    values = jnp.where(good_so_far(config, tokens, lengths)[:, 1:], values, jnp.nan)
    known = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(known, values, 0.0)


def good_so_far(
    config: ModelConfig, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
) -> Bool[Array, "B S"]:
    """Return where no token of the row, up to here, is outside the vocabulary."""
    live = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    bad = live & ((tokens < 0) | (tokens >= config.vocab_size))
    return jnp.cumsum(bad, axis=1) == 0


def next_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    exec: Exec,
) -> Float[Array, "B N"]:
    """Return the log-probability of tokens[:, 1:], a chunk of rows at a time."""
    batch, width, dim = hidden.shape

    def one(args: tuple[Array, Array]) -> Array:
        logits = logits_of(params, config, args[0], exec)
        return logprobs_of(logits, args[1], exec)

    step = one if exec.exact else jax.checkpoint(one)
    rows = (hidden[:, :-1].reshape(-1, dim), tokens[:, 1:].reshape(-1))
    return map_chunks(step, rows, exec.score_chunk * batch).reshape(batch, width - 1)


def map_chunks(function: Callable[[Any], Any], rows: Any, chunk: int) -> Any:
    """Apply a function of rows to `chunk` of them at a time; what it makes for a chunk is freed.

    `rows` is a pytree of arrays with a common leading axis, padded with zeros to whole chunks.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    chunk = min(chunk, max(num_rows, 1))
    num_chunks = -(-num_rows // chunk)

    def split(x: Array) -> Array:
        padding = [(0, num_chunks * chunk - num_rows)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(num_chunks, chunk, *x.shape[1:])

    values = lax.map(function, jax.tree.map(split, rows))
    # Spelled out: -1 is ambiguous where no top log-probabilities are wanted.
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:num_rows], values
    )


def final_hidden(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    exec: Exec,
    taps: tuple[str, ...] = (),
) -> tuple[Float[Array, "B S D"], Taps]:
    """Run whole sequences: at once without a cache, or token by token through one in exact mode."""
    if exec.exact:
        cache, tables = scratch_cache(params, config, tokens.shape, exec)
        inputs = make_inputs(tokens, lengths=lengths, block_tables=tables)
        hidden, _, seen = run_paged(params, config, cache, inputs, exec, taps)
        return hidden, seen
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    context = Dense(positions=jnp.where(offset < lengths[:, None], offset, -1))
    hidden, _, seen = run_layers(params, config, tokens, context, moe_tile=None, taps=taps)
    return hidden, seen


def scratch_cache(
    params: Params, config: ModelConfig, shape: tuple[int, ...], exec: Exec
) -> tuple[KVCache, tuple[Int[Array, "B M"], ...]]:
    """Return a cache just large enough for tokens of `shape` [B, S], and its block tables."""
    batch, width = shape
    per_row = -(-width // exec.page_size)
    cache = make_cache(params, config, num_pages=1 + batch * per_row, exec=exec)
    return cache, (row_tables(batch, per_row),) * len(cache.groups)
