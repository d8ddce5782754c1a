"""One pass of new tokens through the model, plain or in exact tiles: every step is built of it."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.kv.cache import KVCache, init_cache
from inferjax.layers.context import paged
from inferjax.models.decoder import Taps, run_layers, unembed
from inferjax.params import Params
from inferjax.runtime.inputs import StepInputs, positions_of
from inferjax.runtime.tiles import map_tiles
from inferjax.sampling import Sampled, SampleState, Sampling, sample
from inferjax.sampling.chain import raw_logprobs
from inferjax.sampling.logprobs import log_normalizer, pick_values


def make_cache(params: Params, config: ModelConfig, *, num_pages: int, exec: Exec) -> KVCache:
    """Allocate a cache in `exec.kv_dtype`, or in the dtype that the weights have now."""
    kind = exec.kv_dtype or str(params.embed.dtype)
    return init_cache(config, num_pages=num_pages, exec=exec, dtype=kind)


def run_paged(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    inputs: StepInputs,
    exec: Exec,
    taps: tuple[str, ...] = (),
) -> tuple[Float[Array, "B T D"], KVCache, Taps]:
    """Write the new tokens' keys and values and return their final hidden states."""
    positions = positions_of(inputs)
    if exec.exact:
        return _run_exact(params, config, cache, inputs, positions, exec, taps)
    lengths = jnp.where(inputs.lengths > 0, inputs.starts + inputs.lengths, 0)
    context = paged(cache, positions, lengths, inputs.block_tables, exec.attention)
    hidden, context, seen = run_layers(
        params, config, inputs.tokens, context, moe_tile=None, taps=taps
    )
    return hidden, context.cache, seen


def logits_of(
    params: Params, config: ModelConfig, hidden: Float[Array, "R D"], exec: Exec
) -> Float[Array, "R V"]:
    """Return float32 logits of independent rows."""
    if not exec.exact:
        return unembed(params, config, hidden)
    return map_tiles(
        lambda _, rows: (None, unembed(params, config, rows)), None, hidden, exec.tile
    )[1]


def logprobs_of(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], exec: Exec
) -> Float[Array, " R"]:
    """Return raw log-probabilities of `tokens`: the one value that scoring and sampling report."""
    return pick_values(logits, tokens) - normalizer_of(logits, exec)


def normalizer_of(logits: Float[Array, "R V"], exec: Exec) -> Float[Array, " R"]:
    """Return what log-probabilities are short of their logits, in independent rows."""
    if not exec.exact:
        return log_normalizer(logits)
    return map_tiles(lambda _, rows: (None, log_normalizer(rows)), None, logits, exec.tile)[1]


def sample_rows(
    logits: Float[Array, "B V"], sampling: Sampling, state: SampleState, exec: Exec
) -> Sampled:
    """Draw one token per row."""

    def draw(_: None, rows: tuple[Array, Sampling, SampleState]) -> tuple[None, Sampled]:
        return None, sample(*rows, candidates=exec.candidates, top_logprobs=exec.top_logprobs)

    rows = (logits, sampling, state)
    if not exec.exact:
        return draw(None, rows)[1]
    drawn = map_tiles(draw, None, rows, exec.tile)[1]
    ids = (drawn.tokens, drawn.top_ids, sampling.logprob_ids)
    values = raw_logprobs(logits, normalizer_of(logits, exec), *ids)
    return dataclasses.replace(drawn, **values)


def last_rows(hidden: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Return each row's hidden state at its last new token."""
    index = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, index, axis=1)[:, 0]


def _run_exact(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    inputs: StepInputs,
    positions: Int[Array, "B T"],
    exec: Exec,
    taps: tuple[str, ...],
) -> tuple[Float[Array, "B T D"], KVCache, Taps]:
    """Run every token as a row of its own, so that a prompt token equals a decoded one."""
    batch, width = inputs.tokens.shape
    flat = positions.reshape(-1)
    tables = tuple(jnp.repeat(t, width, axis=0) for t in inputs.block_tables)

    def run_tile(cache: KVCache, rows: tuple[Array, Array, tuple[Array, ...]]):
        tokens, position, tables = rows
        context = paged(cache, position[:, None], position + 1, tables, exec.attention)
        hidden, context, seen = run_layers(
            params, config, tokens[:, None], context, moe_tile=exec.tile, taps=taps
        )
        return context.cache, (hidden[:, 0], {name: x[:, 0] for name, x in seen.items()})

    rows = (inputs.tokens.reshape(-1), flat, tables)
    cache, (hidden, seen) = map_tiles(run_tile, cache, rows, exec.tile, live=flat >= 0)
    unflat = {name: x.reshape(batch, width, -1) for name, x in seen.items()}
    return hidden.reshape(batch, width, -1), cache, unflat
