"""The steps over a paged cache: extend rows by given tokens, or decode tokens of their own."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidInput, ShapeError
from inferjax.kv.cache import KVCache, cache_shapes, is_stored, page_size_of
from inferjax.models.decoder import check_taps
from inferjax.params import Params
from inferjax.runtime.arguments import check_count, check_kinds
from inferjax.runtime.inputs import (
    DecodeState,
    StepInputs,
    StepOutput,
    input_status,
    place_status,
    positions_of,
)
from inferjax.runtime.passes import last_rows, logits_of, run_paged, sample_rows
from inferjax.runtime.score import next_logprobs
from inferjax.sampling import NO_LIMIT, Sampled, SampleState, Status, stopped
from inferjax.sampling.blocks import broken_rows
from inferjax.sharding import automatic, rows_like
from pallas_kernels.unbatched import any_row

Outputs = Literal["last", "all", "logprobs"]


def extend(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    inputs: StepInputs,
    *,
    outputs: Outputs = "last",
    taps: tuple[str, ...] = (),
    exec: Exec = Exec(),
) -> tuple[StepOutput, KVCache]:
    """Append new tokens to rows of the cache; prefill, chunked prefill and verification are this.

    `values` are float32 logits after each row's last token [B, V] ("last") or after every token
    [B, T, V] ("all"), or the log-probability of each token's successor within the row [B, T], 0
    where there is none ("logprobs"). The cache is donated. A row whose tokens or pages are out of
    range says so in `status` and touches no page but its own.

    Raises: ShapeError, InvalidInput.
    """
    check_kinds(params, config, exec)
    _check_step(config, cache, inputs.block_tables, inputs.tokens.shape[0])
    if outputs not in ("last", "all", "logprobs"):
        raise InvalidInput(f"outputs={outputs!r}", fix='use "last", "all" or "logprobs"')
    taps = check_taps(taps, config)
    if inputs.adapter is not None:
        raise InvalidInput(
            "inputs.adapter is set",
            why="no adapters can be loaded yet, and the rows would silently run without them",
            fix="leave it None",
        )
    return _extend(params, cache, inputs, config=config, outputs=outputs, taps=taps, exec=exec)


prefill = functools.partial(extend, outputs="last")
verify = functools.partial(extend, outputs="all")


def start(
    config: ModelConfig,
    logits: Float[Array, "B V"],
    state: DecodeState,
    *,
    exec: Exec = Exec(),
) -> tuple[StepOutput, DecodeState]:
    """Draw the first token of rows that have just been prefilled, from their last logits.

    `values` is a `Sampled` of [B] arrays.
    """
    return _start(logits, state, config=config, exec=exec)


def decode(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    state: DecodeState,
    *,
    steps: int,
    exec: Exec = Exec(),
) -> tuple[StepOutput, DecodeState, KVCache]:
    """Draw up to `steps` tokens per row in one dispatch.

    `values` is a `Sampled` of [B, steps] arrays; after a row's end its tokens are the pad id and
    its log-probabilities 0. A row ends by a stop id, by `max_tokens`, or by a problem named in
    `status`. When all rows are done the remaining steps cost nothing. The cache is donated; the
    state is small and often shares buffers, so it is not.

    Raises: ShapeError, InvalidInput.
    """
    check_kinds(params, config, exec)
    check_count("steps", steps, 1)
    _check_step(config, cache, state.block_tables, state.tokens.shape[0])
    return _decode(params, cache, state, config=config, steps=steps, exec=exec)


@jax.jit(static_argnames=("config", "outputs", "taps", "exec"), donate_argnames=("cache",))
@automatic(lambda _, cache, inputs: (rows_like(inputs.tokens), cache))
def _extend(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    outputs: Outputs,
    taps: tuple[str, ...],
    exec: Exec,
) -> tuple[StepOutput, KVCache]:
    return extend_rows(params, config, cache, inputs, outputs=outputs, taps=taps, exec=exec)


def extend_rows(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    inputs: StepInputs,
    *,
    outputs: Outputs,
    taps: tuple[str, ...],
    exec: Exec,
) -> tuple[StepOutput, KVCache]:
    """Do what `extend` does, inside a program."""
    status = input_status(inputs, cache, config)
    hidden, cache, seen = run_paged(params, config, cache, inputs, exec, taps)
    live = inputs.lengths > 0
    match outputs:
        case "logprobs":
            values = _successor_logprobs(params, config, hidden, inputs, exec)
            broken = jnp.any(~jnp.isfinite(values), axis=1)
        case "last":
            values = logits_of(params, config, last_rows(hidden, inputs.lengths), exec)
            broken = broken_rows(values)
        case "all":
            flat = logits_of(params, config, hidden.reshape(-1, hidden.shape[-1]), exec)
            values = flat.reshape(*hidden.shape[:2], -1)
            inside = positions_of(inputs) >= 0
            broken = jnp.any(inside & broken_rows(values), axis=1)
    status |= jnp.where(broken & live, int(Status.NAN_LOGITS), 0)
    return StepOutput(values=values, status=status, taps=seen), cache


def _successor_logprobs(
    params: Params, config: ModelConfig, hidden: Array, inputs: StepInputs, exec: Exec
) -> Array:
    values = next_logprobs(params, config, hidden, inputs.tokens, exec)
    values = jnp.pad(values, ((0, 0), (0, 1)))
    known = jnp.arange(1, values.shape[1] + 1, dtype=jnp.int32)[None] < inputs.lengths[:, None]
    return jnp.where(known, values, 0.0)


@jax.jit(static_argnames=("config", "exec"))
@automatic(lambda logits, state: (rows_like(logits), state))
def _start(
    logits: Array, state: DecodeState, *, config: ModelConfig, exec: Exec
) -> tuple[StepOutput, DecodeState]:
    drawn, state = draw(logits, config, state, exec)
    return StepOutput(values=drawn, status=drawn.status), state


@jax.jit(static_argnames=("config", "steps", "exec"), donate_argnames=("cache",))
@automatic(lambda _, cache, state: (rows_like(state.tokens), state, cache))
def _decode(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    *,
    config: ModelConfig,
    steps: int,
    exec: Exec,
) -> tuple[StepOutput, DecodeState, KVCache]:
    drawn, state, cache = decode_loop(params, config, cache, state, steps, exec)
    return StepOutput(values=drawn, status=any_bits(drawn.status)), state, cache


def decode_loop(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    state: DecodeState,
    steps: int,
    exec: Exec,
    limit: Int[Array, ""] | None = None,
) -> tuple[Sampled, DecodeState, KVCache]:
    """Run decode steps until all rows are done, at most `steps`; outputs are [B, steps].

    `limit` is the same bound as a value that may change without a new program.

    A `while_loop` whose predicate no `vmap` can batch, instead of a scan with a cond inside: the
    cache never passes through a branch, and the steps that are not needed do not run.
    """
    outputs = _empty_outputs(state, steps, config, exec)
    if steps == 0:
        return outputs, state, cache
    most = steps if limit is None else jnp.minimum(limit, steps)

    def more(carry: tuple[Array, Any, DecodeState, KVCache]) -> Array:
        return (carry[0] < most) & any_row(~carry[2].done)

    def step(carry: tuple[Array, Any, DecodeState, KVCache]):
        i, outputs, state, cache = carry
        drawn, state, cache = decode_step(params, config, cache, state, exec)
        put = lambda out, new: lax.dynamic_update_index_in_dim(out, new, i, 1)  # noqa: E731
        return i + 1, jax.tree.map(put, outputs, drawn), state, cache

    _, outputs, state, cache = lax.while_loop(more, step, (jnp.int32(0), outputs, state, cache))
    return outputs, state, cache


def any_bits(status: Int[Array, "B N"]) -> Int[Array, " B"]:
    """Return the status bits that a row had in any step."""
    return lax.reduce(status, jnp.int32(0), lax.bitwise_or, (1,))


def decode_step(
    params: Params, config: ModelConfig, cache: KVCache, state: DecodeState, exec: Exec
) -> tuple[Sampled, DecodeState, KVCache]:
    """Put every live row's newest token into the cache and draw the next one."""
    live = ~state.done
    inputs = StepInputs(
        tokens=state.tokens[:, None],
        lengths=live.astype(jnp.int32),
        starts=state.sample.position - 1,
        block_tables=state.block_tables,
    )
    lost = place_status(inputs.starts, inputs.lengths, state.block_tables, cache, config)
    lost = jnp.where(live, lost, 0)
    hidden, cache, _ = run_paged(params, config, cache, inputs, exec)
    logits = logits_of(params, config, hidden[:, 0], exec)
    drawn, state = draw(logits, config, state, exec)
    drawn = dataclasses.replace(drawn, status=drawn.status | lost)
    return drawn, dataclasses.replace(state, done=state.done | (lost != 0)), cache


def draw(
    logits: Array, config: ModelConfig, state: DecodeState, exec: Exec
) -> tuple[Sampled, DecodeState]:
    """Draw each live row's next token from its logits and move the row on by one."""
    live = ~state.done
    drawn = _hide_dead(sample_rows(logits, state.sampling, state.sample, exec), live, config)
    sample = _advance(state.sample, drawn.tokens, live)
    count = sample.history_len - sample.prompt_len
    ended = stopped(drawn.tokens, state.sampling, count) | (count >= state.sampling.max_tokens)
    return drawn, dataclasses.replace(
        state,
        tokens=jnp.where(live, drawn.tokens, state.tokens),
        done=state.done | ended | (drawn.status != 0),
        sample=sample,
    )


def _advance(sample: SampleState, tokens: Int[Array, " B"], live: Array) -> SampleState:
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    slot = jnp.where(live, sample.history_len, NO_LIMIT)
    one = live.astype(jnp.int32)
    return dataclasses.replace(
        sample,
        position=sample.position + one,
        history=sample.history.at[rows, slot].set(tokens, mode="drop"),
        history_len=sample.history_len + one,
    )


def pad_id(config: ModelConfig) -> int:
    """Return the id that fills rows after their end."""
    return config.pad_id if config.pad_id is not None and config.pad_id >= 0 else 0


def _hide_dead(drawn: Sampled, live: Array, config: ModelConfig) -> Sampled:
    return dataclasses.replace(
        drawn,
        tokens=jnp.where(live, drawn.tokens, pad_id(config)),
        logprobs=jnp.where(live, drawn.logprobs, 0.0),
        sampled_logprobs=jnp.where(live, drawn.sampled_logprobs, 0.0),
        top_ids=jnp.where(live[:, None], drawn.top_ids, pad_id(config)),
        top_logprobs=jnp.where(live[:, None], drawn.top_logprobs, 0.0),
        chosen_logprobs=jnp.where(live[:, None], drawn.chosen_logprobs, 0.0),
        status=jnp.where(live, drawn.status, 0),
    )


def _empty_outputs(state: DecodeState, steps: int, config: ModelConfig, exec: Exec) -> Sampled:
    batch, top = state.tokens.shape[0], exec.top_logprobs
    num_chosen = state.sampling.logprob_ids.shape[1]
    return Sampled(
        tokens=jnp.full((batch, steps), pad_id(config), jnp.int32),
        logprobs=jnp.zeros((batch, steps), jnp.float32),
        sampled_logprobs=jnp.zeros((batch, steps), jnp.float32),
        top_ids=jnp.full((batch, steps, top), pad_id(config), jnp.int32),
        top_logprobs=jnp.zeros((batch, steps, top), jnp.float32),
        chosen_logprobs=jnp.zeros((batch, steps, num_chosen), jnp.float32),
        status=jnp.zeros((batch, steps), jnp.int32),
    )


def _check_step(config: ModelConfig, cache: Any, tables: tuple[Any, ...], batch: int) -> None:
    """Refuse a cache or block tables that do not belong to this model and batch."""
    pools = cache.groups if isinstance(cache, KVCache) else ()
    size = page_size_of(cache) if pools and pools[0].values.ndim == 6 else 1
    exec = Exec(page_size=size)
    wanted = [(s[0], *s[2:]) for s in cache_shapes(config, num_pages=2, exec=exec)]
    found = [(pool.values.shape[0], *pool.values.shape[2:]) for pool in pools]
    if found != wanted or not all(map(is_stored, pools)):
        kinds = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(pools)})
        raise ShapeError(
            f"the cache's pools are {found} of {kinds}, without their number of pages",
            why=f"the model's layers need {wanted}",
            fix="make the cache with init_cache(config, ...)",
        )
    shapes = [table.shape for table in tables]
    if len(shapes) != len(pools) or any(len(s) != 2 or s[0] != batch or not s[1] for s in shapes):
        raise ShapeError(
            f"block tables have shapes {shapes}",
            why=f"there are {len(pools)} cache groups and {batch} rows",
            fix="give one table [rows, pages] per group",
        )
