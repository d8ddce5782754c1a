"""One result for each text: vectors of embedding models, label logits of classifiers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.config import Exec, ModelConfig, Pooling
from inferjax.errors import InvalidInput
from inferjax.models.decoder import check_head, label_logits, project_out
from inferjax.params import Params
from inferjax.runtime.passes import last_rows
from inferjax.runtime.score import checked, final_hidden, good_so_far
from inferjax.runtime.tiles import map_tiles
from inferjax.sharding import automatic, rows_like


def embed(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    lengths: Any = None,
    *,
    pooling: Pooling | None = None,
    exec: Exec = Exec(),
) -> Float[Array, "B D"]:
    """Return a float32 vector for each text, pooled from its own tokens' final hidden states.

    `pooling` is by default the checkpoint's (`config.pooling`), and where that says nothing the
    last token's state as it is. Any model can be asked, whatever its head. Ids are those the model
    was trained on: its prompts, and the end token of those that pool the last, are the caller's to
    add where the tokenizer does not. The vector of a traced id outside the vocabulary is NaN.
    Differentiable, except in exact mode.

    Example: `vectors = embed(model.params, model.config, ids, lengths); vectors @ vectors.T` are
    the cosines between texts if the pooling normalises.

    Raises: ShapeError, InvalidInput, RequestTooLong.
    """
    tokens, lengths = checked(params, config, tokens, lengths, exec)
    if pooling is None:
        pooling = config.pooling or Pooling()
    if not isinstance(pooling, Pooling):
        raise InvalidInput(
            f"pooling={pooling!r}",
            why="it must be a Pooling",
            fix='pass Pooling(kind="mean", normalize=True), for example',
        )
    return _embed(params, tokens, lengths, config=config, pooling=pooling, exec=exec)


def classify(
    params: Params, config: ModelConfig, tokens: Any, lengths: Any = None, *, exec: Exec = Exec()
) -> Float[Array, "B C"]:
    """Return the float32 logits of each text's labels (`config.labels`), after its last token.

    A reranker is a classifier of one label: the logit of query and document in one text orders the
    documents. Those that are causal models instead (Qwen3-Reranker) answer yes or no: take the last
    position of `forward`, and the difference of the two words' logits there. The logits of a
    traced id outside the vocabulary are NaN. Differentiable, except in exact mode.

    Raises: UnsupportedModel for a model without such a head; ShapeError, InvalidInput,
      RequestTooLong.
    """
    tokens, lengths = checked(params, config, tokens, lengths, exec)
    check_head(config, "labels")
    return _classify(params, tokens, lengths, config=config, exec=exec)


@jax.jit(static_argnames=("config", "pooling", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _embed(
    params: Params,
    tokens: Array,
    lengths: Array,
    *,
    config: ModelConfig,
    pooling: Pooling,
    exec: Exec,
) -> Array:
    hidden, _ = final_hidden(params, config, tokens, lengths, exec)
    states = _pool(hidden, lengths, pooling, exec)

    def finish(rows: Array) -> Array:
        if params.project_out is not None:
            rows = project_out(params, rows.astype(hidden.dtype))
        vectors = rows.astype(jnp.float32)
        return _unit(vectors) if pooling.normalize else vectors

    vectors = _by_rows(finish, states, exec)
    return jnp.where(_good_rows(config, tokens, lengths)[:, None], vectors, jnp.nan)


@jax.jit(static_argnames=("config", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _classify(
    params: Params, tokens: Array, lengths: Array, *, config: ModelConfig, exec: Exec
) -> Array:
    hidden, _ = final_hidden(params, config, tokens, lengths, exec)
    states = last_rows(hidden, lengths)
    logits = _by_rows(lambda rows: label_logits(params, config, rows), states, exec)
    return jnp.where(_good_rows(config, tokens, lengths)[:, None], logits, jnp.nan)


def _pool(
    hidden: Float[Array, "B S D"], lengths: Int[Array, " B"], pooling: Pooling, exec: Exec
) -> Float[Array, "B D"]:
    match pooling.kind:
        case "first":
            return hidden[:, 0]
        case "last":
            return last_rows(hidden, lengths)
        case "mean":
            return _mean(hidden, lengths, exec)


def _mean(
    hidden: Float[Array, "B S D"], lengths: Int[Array, " B"], exec: Exec
) -> Float[Array, "B D"]:
    """Average the states of a row's own tokens in float32."""
    own = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    values = jnp.where(own[:, :, None], hidden.astype(jnp.float32), 0.0)
    count = lengths[:, None].astype(jnp.float32)
    if not exec.exact:
        return values.sum(axis=1) / count
    # One after the other: the order in which XLA sums follows the width of the batch.
    total = lax.fori_loop(
        0, values.shape[1], lambda i, total: total + values[:, i], jnp.zeros_like(values[:, 0])
    )
    return total / count


def _unit(vectors: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """Scale to length one; a vector of zeros stays one."""
    square = jnp.square(vectors).sum(axis=-1, keepdims=True)
    return vectors * lax.rsqrt(jnp.maximum(square, 1e-24))


def _by_rows(
    function: Callable[[Array], Array], rows: Float[Array, "B D"], exec: Exec
) -> Float[Array, "B E"]:
    """Apply a function of independent rows, in exact mode to fixed tiles of them."""
    if not exec.exact:
        return function(rows)
    return map_tiles(lambda _, part: (None, function(part)), None, rows, exec.tile)[1]


def _good_rows(
    config: ModelConfig, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
) -> Bool[Array, " B"]:
    """Return which rows have a length, and no token outside the vocabulary."""
    known = (lengths >= 1) & (lengths <= tokens.shape[1])
    return known & good_so_far(config, tokens, lengths)[:, -1]
