"""What a step reads and returns, as pytrees built in one place so that dtypes never vary."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from inferjax.config import ModelConfig, cache_groups
from inferjax.kv.cache import TRASH_PAGE, KVCache, num_pages_of, page_size_of
from inferjax.pytree import pytree
from inferjax.runtime.arguments import as_integers, as_rows, as_tokens
from inferjax.sampling import SampleState, Sampling, Status


@pytree
class StepInputs:
    """New tokens of a step: row b appends `tokens[b, :lengths[b]]` after `starts[b]` cached ones.

    Several rows may belong to one sequence (the same block table, consecutive starts). A length of
    0 is padding. `block_tables` has one [B, M] of page ids per cache group. `adapter` is the place
    of each row's adapter; until adapters can be loaded, only None runs.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    block_tables: tuple[Int[Array, "B M"], ...]
    adapter: Int[Array, " B"] | None = None


@pytree
class StepOutput:
    """Values of a step with one row per sequence, `Status` bits per row, and tapped activations."""

    values: Any
    status: Int[Array, " B"]
    taps: dict[str, Float[Array, "B T D"]] = dataclasses.field(default_factory=dict)


@pytree
class DecodeState:
    """Everything that decoding carries from step to step, resident on the device.

    `tokens` are the rows' newest tokens, drawn but not yet in the cache; they belong at position
    `sample.position - 1`. Rows that are `done` compute nothing that anyone sees: they write to the
    trash page and return padding.
    """

    tokens: Int[Array, " B"]
    done: Bool[Array, " B"]
    sample: SampleState
    sampling: Sampling
    block_tables: tuple[Int[Array, "B M"], ...]


def make_inputs(
    tokens: Any, *, lengths: Any = None, starts: Any = 0, block_tables: Sequence[Any]
) -> StepInputs:
    """Build `StepInputs` with every dtype fixed; `lengths` defaults to all of `tokens`.

    Raises: ShapeError, InvalidInput.
    """
    tokens = as_tokens(tokens)
    batch, width = tokens.shape
    return StepInputs(
        tokens=tokens,
        lengths=as_rows(width if lengths is None else lengths, "lengths", batch),
        starts=as_rows(starts, "starts", batch),
        block_tables=tuple(as_integers(t, "block tables") for t in block_tables),
    )


def init_state(
    prompts: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    *,
    keys: Key[Array, " B"],
    sampling: Sampling,
    block_tables: Sequence[Int[Array, "B M"]],
    room: int,
    sample_index: Int[Array, " B"] | None = None,
    forced: Int[Array, "B F"] | None = None,
) -> DecodeState:
    """Return the state of rows whose prompts are cached and whose first token is still to be drawn.

    `room` is how many tokens the history has place for beyond `prompts`. `forced` are the tokens
    that each row's output must begin with, padded with -1; what has no place is left out. A row
    whose `max_tokens` is 0 is done.
    """
    history, forced_len = _with_forced(jnp.pad(prompts, ((0, 0), (0, room))), lengths, forced)
    sample = SampleState(
        key=keys,
        sample_index=jnp.zeros_like(lengths) if sample_index is None else sample_index,
        position=lengths,
        history=history,
        history_len=lengths,
        prompt_len=lengths,
        forced_len=forced_len,
    )
    return DecodeState(
        tokens=jnp.zeros_like(lengths),
        done=sampling.max_tokens < 1,
        sample=sample,
        sampling=sampling,
        block_tables=tuple(block_tables),
    )


def _with_forced(
    history: Int[Array, "B C"], lengths: Int[Array, " B"], forced: Int[Array, "B F"] | None
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Write forced ids behind each row's prompt; return the history and where they end."""
    if forced is None:
        return history, jnp.zeros_like(lengths)
    rows = jnp.arange(forced.shape[0], dtype=jnp.int32)[:, None]
    place = lengths[:, None] + jnp.arange(forced.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(forced >= 0, place, history.shape[1])
    count = jnp.sum(forced >= 0, axis=1, dtype=jnp.int32)
    return history.at[rows, place].set(forced, mode="drop"), lengths + count


def positions_of(inputs: StepInputs) -> Int[Array, "B T"]:
    """Return the position of every new token, -1 at padding."""
    offset = jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where(offset < inputs.lengths[:, None], inputs.starts[:, None] + offset, -1)


def input_status(inputs: StepInputs, cache: KVCache, config: ModelConfig) -> Int[Array, " B"]:
    """Return the bits of rows whose tokens, lengths, starts or pages are out of range."""
    width, live = inputs.tokens.shape[1], inputs.lengths > 0
    wrong = (inputs.tokens < 0) | (inputs.tokens >= config.vocab_size)
    wrong &= jnp.arange(width, dtype=jnp.int32)[None] < inputs.lengths[:, None]
    status = jnp.where(jnp.any(wrong, axis=1), int(Status.BAD_TOKEN), 0)
    place = place_status(inputs.starts, inputs.lengths, inputs.block_tables, cache, config)
    odd = (inputs.lengths > width) | (inputs.lengths < 0) | (live & (inputs.starts < 0))
    return jnp.where(live, status | place, 0) | jnp.where(odd, int(Status.BAD_LENGTH), 0)


def place_status(
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    block_tables: tuple[Int[Array, "B M"], ...],
    cache: KVCache,
    config: ModelConfig,
) -> Int[Array, " B"]:
    """Return the bits of rows that have no place for new tokens: in the context, or in pages.

    A page behind a window may be anything: nobody reads it. All others must be in the pool, and
    not the trash page, where tokens are lost.
    """
    size, total = page_size_of(cache), starts + lengths
    # The sum of two huge numbers wraps around, so the start is looked at by itself.
    long = (starts >= config.max_context) | (total > config.max_context)
    fault = jnp.zeros(total.shape, jnp.bool_)
    groups = cache_groups(config)
    for table, num_pages, group in zip(block_tables, num_pages_of(cache), groups, strict=True):
        oldest = starts - group.window + 1 if group.window else jnp.zeros_like(starts)
        first = jnp.arange(table.shape[1], dtype=jnp.int32)[None] * size
        needed = (first < total[:, None]) & (first + size > oldest[:, None])
        fault |= jnp.any(needed & ((table <= TRASH_PAGE) | (table >= num_pages)), axis=1)
        fault |= total > table.shape[1] * size
    status = jnp.where(fault, int(Status.OUT_OF_PAGES), 0)
    return status | jnp.where(long, int(Status.TOO_LONG), 0)


def insert(state: DecodeState, slots: Int[Array, " n"], rows: DecodeState) -> DecodeState:
    """Place `rows` into the given slots; the shapes beyond the batch axis must agree."""
    return jax.tree.map(lambda full, new: full.at[slots].set(new, mode="drop"), state, rows)


def release(state: DecodeState, slots: Int[Array, " n"]) -> DecodeState:
    """Free slots: their rows stop, and their tables point at the trash page."""
    tables = tuple(t.at[slots].set(0, mode="drop") for t in state.block_tables)
    return dataclasses.replace(
        state, done=state.done.at[slots].set(True, mode="drop"), block_tables=tables
    )
