"""Programs over the slots of an engine: rows of one decode state that stays on the device.

The state has N rows, its slots, whose `block_tables` are `()`: tables come with each dispatch, for
their pages change. State and cache are donated, so use only what is returned. Arguments may be
NumPy arrays, which travel with the dispatch. Nothing is checked here: the engine, which builds the
arguments, has.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.kv import cache as kv
from inferjax.kv.cache import KVCache
from inferjax.params import Params
from inferjax.pytree import pytree
from inferjax.runtime.inputs import DecodeState, StepInputs, StepOutput, input_status, insert
from inferjax.runtime.passes import last_rows, logits_of, normalizer_of, run_paged
from inferjax.runtime.score import map_chunks
from inferjax.runtime.steps import any_bits, decode_loop, draw, extend_rows
from inferjax.sampling import Status
from inferjax.sampling.blocks import broken_rows, largest
from inferjax.sampling.logprobs import ids_logprobs
from inferjax.sharding import automatic, rows_like


@pytree
class Scores:
    """What `score_rows` returns: logits after each row's last token, and what was scored.

    `logprobs` are raw, for the tokens asked for and 0 elsewhere; `top_ids` and `top_logprobs` are
    the most likely tokens at these places, -1 and 0 elsewhere.
    """

    last: Float[Array, "Rmax V"]
    logprobs: Float[Array, "R W"]
    top_ids: Int[Array, "R W n"]
    top_logprobs: Float[Array, "R W n"]


@jax.jit(donate_argnames=("state",))
@automatic(lambda state, *_: state)
def place(
    state: DecodeState, index: Int[Array, " N"], slots: Int[Array, " R"], rows: DecodeState
) -> DecodeState:
    """Give slot s what slot `index[s]` held, then write row i of `rows` into `slots[i]`.

    A slot outside the state is nowhere. No two slots of the state may share a buffer.
    """
    moved = jax.tree.map(lambda x: x.at[index].get(mode="clip"), state)
    return insert(moved, _inside(slots, state), rows)


@jax.jit(static_argnames=("config", "max_rows", "exec"), donate_argnames=("cache",))
@automatic(lambda _, cache, inputs: (rows_like(inputs.tokens), cache))
def prefill_rows(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    max_rows: int,
    exec: Exec,
) -> tuple[StepOutput, KVCache]:
    """Append tokens to rows of the cache; the logits after each row's last one are `values`.

    They are padded with zeros to `max_rows` rows, so that `begin` is one program.
    """
    output, cache = extend_rows(params, config, cache, inputs, outputs="last", taps=(), exec=exec)
    return dataclasses.replace(output, values=_pad_rows(output.values, max_rows)), cache


@jax.jit(static_argnames=("config", "max_rows", "exec"), donate_argnames=("cache",))
@automatic(lambda _, cache, inputs, __: (rows_like(inputs.tokens), cache))
def score_rows(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    targets: Int[Array, "R W"],
    *,
    config: ModelConfig,
    max_rows: int,
    exec: Exec,
) -> tuple[StepOutput, KVCache]:
    """Do what `prefill_rows` does, and score `targets[r, t]` after token t of row r; -1 is none.

    `values` are `Scores`, with `exec.top_logprobs` most likely tokens. Logits exist for
    `exec.score_chunk` tokens at a time.
    """
    status = input_status(inputs, cache, config)
    hidden, cache, _ = run_paged(params, config, cache, inputs, exec)
    last = logits_of(params, config, last_rows(hidden, inputs.lengths), exec)

    def score(rows: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        states, wanted = rows
        return _scored(logits_of(params, config, states, exec), wanted, exec)

    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    scored = map_chunks(score, flat, exec.score_chunk)
    logprobs, top_ids, top_logprobs = (x.reshape(*targets.shape, *x.shape[1:]) for x in scored)
    broken = broken_rows(last) | jnp.any(~jnp.isfinite(logprobs), axis=1)
    status |= jnp.where(broken & (inputs.lengths > 0), int(Status.NAN_LOGITS), 0)
    status |= jnp.where(jnp.any(targets >= config.vocab_size, axis=1), int(Status.BAD_TOKEN), 0)
    values = Scores(
        last=_pad_rows(last, max_rows),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    return StepOutput(values=values, status=status), cache


@jax.jit(static_argnames=("config", "exec"), donate_argnames=("state",))
@automatic(
    lambda logits, state, _: (rows_like(logits), rows_like(logits), rows_like(logits), state)
)
def begin(
    logits: Float[Array, "R V"],
    state: DecodeState,
    slots: Int[Array, " R"],
    *,
    config: ModelConfig,
    exec: Exec,
) -> tuple[StepOutput, Int[Array, " R"], Bool[Array, " R"], DecodeState]:
    """Draw the first token of prefilled slots, row i of the logits being that of `slots[i]`.

    Returns a `Sampled` of [R] arrays, how many tokens each row drew (0 or 1), which rows are done,
    and the state. A slot outside the state draws nothing.
    """
    slots = _inside(slots, state)
    rows = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), state)
    rows = dataclasses.replace(rows, done=rows.done | (slots == state.done.shape[0]))
    drawn, after = draw(logits, config, rows, exec)
    counts = after.sample.history_len - rows.sample.history_len
    return (
        StepOutput(values=drawn, status=drawn.status),
        counts,
        after.done,
        insert(state, slots, after),
    )


@jax.jit(static_argnames=("config", "steps", "exec"), donate_argnames=("cache", "state"))
@automatic(lambda _, cache, state, __, active, ___: (*[rows_like(active)] * 3, state, cache))
def decode_slots(
    params: Params,
    cache: KVCache,
    state: DecodeState,
    tables: tuple[Int[Array, "B M"], ...],
    active: Bool[Array, " B"],
    limit: Int[Array, ""],
    *,
    config: ModelConfig,
    steps: int,
    exec: Exec,
) -> tuple[StepOutput, Int[Array, " B"], Bool[Array, " B"], DecodeState, KVCache]:
    """Draw up to `limit` tokens, at most `steps`, for the active ones of the first B slots.

    Returns a `Sampled` of [B, steps] arrays, how many tokens each slot drew, which are done, the
    state and the cache. Slots that are not active keep every bit of their state.
    """
    before = jax.tree.map(lambda x: x[: active.shape[0]], state)
    rows = dataclasses.replace(before, done=before.done | ~active, block_tables=tables)
    drawn, after, cache = decode_loop(params, config, cache, rows, steps, exec, limit)
    counts = after.sample.history_len - before.sample.history_len
    done = jnp.where(active, after.done, before.done)
    after = dataclasses.replace(after, done=done, block_tables=())
    put = lambda full, new: lax.dynamic_update_slice_in_dim(full, new, 0, 0)  # noqa: E731
    output = StepOutput(values=drawn, status=any_bits(drawn.status))
    return output, counts, done, jax.tree.map(put, state, after), cache


@jax.jit(static_argnames=("group",), donate_argnames=("cache",))
@automatic(lambda cache, *_: cache)
def copy_group_pages(
    cache: KVCache, source: Int[Array, " n"], target: Int[Array, " n"], *, group: int
) -> KVCache:
    """Copy pages of one cache group; a target of 0 or -1 is padding."""
    return kv.copy_group_pages(cache, source, target, group=group)


def _inside(slots: Int[Array, " R"], state: DecodeState) -> Int[Array, " R"]:
    """Return slots with everything outside the state moved to its end: -1 would wrap around."""
    size = state.done.shape[0]
    return jnp.where((slots >= 0) & (slots < size), slots, size)


def _pad_rows(values: Float[Array, "R V"], max_rows: int) -> Float[Array, "Rmax V"]:
    return jnp.pad(values, ((0, max_rows - values.shape[0]), (0, 0)))


def _scored(
    logits: Float[Array, "R V"], targets: Int[Array, " R"], exec: Exec
) -> tuple[Float[Array, " R"], Int[Array, "R n"], Float[Array, "R n"]]:
    """Return the log-probabilities of targets, the top ids and theirs, at places with a target."""
    normalizer = normalizer_of(logits, exec)
    logprobs = ids_logprobs(logits, targets[:, None], normalizer)[:, 0]
    _, top_ids = largest(logits, exec.top_logprobs)
    top_ids = jnp.where(targets[:, None] >= 0, top_ids, -1)
    return logprobs, top_ids, ids_logprobs(logits, top_ids, normalizer)
