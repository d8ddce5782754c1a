"""One reply as a host loop: prefill, then a few tokens per dispatch, as they come.

All shapes come from a few buckets, so that a prompt of another length compiles nothing new; the
tokens are those of `generate`.
"""

import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from inferjax.checkpoint.load import Model
from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidInput, InvalidSampling, ShapeError
from inferjax.kv.cache import KVCache, num_pages_of, page_size_of, row_tables
from inferjax.models.decoder import check_head
from inferjax.runtime.arguments import (
    as_integers,
    as_tokens,
    check_context,
    check_count,
    check_ids,
    check_kinds,
    raise_for_status,
)
from inferjax.runtime.inputs import DecodeState, StepOutput, init_state, make_inputs
from inferjax.runtime.passes import make_cache
from inferjax.runtime.steps import decode, extend, start
from inferjax.sampling import SamplingParams, sampling_arrays, seed_keys
from inferjax.tokenizer import Tokenizer

SMALLEST_BUCKET = 16
SMALLEST_CAPACITY = 512

# Tokens of a reply that the first cache has room for; a longer one doubles it.
FIRST_ROOM = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """Tokens of one dispatch. `finish_reason` is "stop" or "length" with the last ones, else None.

    `top_ids` and `top_logprobs` have the most likely tokens of each place: as many as the
    request's `logprobs` or `exec.top_logprobs`, whichever is more. `chosen_logprobs` has one value
    for each of its `logprob_token_ids`.
    """

    token_ids: list[int]
    logprobs: list[float]
    sampled_logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    chosen_logprobs: list[list[float]]
    finish_reason: str | None


def stream(
    model: Model,
    prompt_ids: Any,
    sampling: SamplingParams = SamplingParams(temperature=0.0),
    *,
    exec: Exec = Exec(),
    steps: int = 8,
) -> Iterator[StreamEvent]:
    """Yield the reply's tokens: the first one as soon as it is known, then up to `steps` at a time.

    Without `max_tokens` the reply may fill the model's context. Without a seed, sampling takes one
    from the system. Stop strings, `include_stop` and `skip_special_tokens` are about text and are
    left to whoever turns tokens into text.

    Raises: InvalidInput, RequestTooLong, InvalidSampling, UnsupportedModel; NonFiniteLogits while
      running.
    """
    if not (isinstance(model, Model) and isinstance(sampling, SamplingParams)):
        raise InvalidInput(
            f"stream got a {type(model).__name__} and a {type(sampling).__name__}",
            why="it takes a loaded Model, token ids and SamplingParams",
            fix="model = load(...); stream(model, model.tokenizer.encode(text))",
        )
    check_kinds(model.params, model.config, exec)
    check_head(model.config, "vocabulary")
    check_count("steps", steps, 1)
    config = model.config
    prompt_ids = _flat(prompt_ids)
    room = _room(prompt_ids, sampling, config)
    num_top = max(exec.top_logprobs, sampling.logprobs or 0)
    request = _prepared(sampling, model.tokenizer, room, num_top)
    exec = dataclasses.replace(exec, top_logprobs=num_top)
    return _run(model, prompt_ids, request, exec, steps, room)


def _flat(prompt_ids: Any) -> list[int]:
    ids = as_integers(prompt_ids, "prompt_ids")
    if ids.ndim != 1:
        raise ShapeError(
            f"prompt_ids have shape {list(ids.shape)}",
            why="a stream is one reply to one prompt",
            fix="give a flat list of ids; generate takes batches",
        )
    return ids.tolist()


def _run(
    model: Model,
    prompt_ids: list[int],
    sampling: SamplingParams,
    exec: Exec,
    steps: int,
    room: int,
) -> Iterator[StreamEvent]:
    params, config = model.params, model.config
    first_room = max(min(room, FIRST_ROOM), len(sampling.forced_token_ids))
    capacity = _bucket(len(prompt_ids) + first_room, SMALLEST_CAPACITY)
    num_pages = -(-capacity // exec.page_size)
    cache = make_cache(params, config, num_pages=1 + num_pages, exec=exec)
    tables = (row_tables(1, num_pages),) * len(cache.groups)
    logits, cache = _prefill(model, prompt_ids, cache, tables, exec)
    state = _first_state(prompt_ids, sampling, tables, capacity, config)
    eos_ids = () if sampling.ignore_eos else config.eos_ids
    stop_ids = frozenset((*eos_ids, *sampling.stop_token_ids))
    num_chosen = len(sampling.logprob_token_ids)
    output, state = start(config, logits, state, exec=exec)
    event = _event(output, state, 0, stop_ids, num_chosen)
    yield event
    count = 1
    while event.finish_reason is None:
        if len(prompt_ids) + count + steps > capacity:
            capacity *= 2
            cache, state = _grown(cache, state, capacity)
        output, state, cache = decode(params, config, cache, state, steps=steps, exec=exec)
        event = _event(output, state, count, stop_ids, num_chosen)
        count += len(event.token_ids)
        yield event


def _room(prompt_ids: Sequence[int], sampling: SamplingParams, config: ModelConfig) -> int:
    """Return how many tokens the reply may have."""
    if not len(prompt_ids):
        raise InvalidInput(
            "empty prompt",
            why="there is nothing to predict from",
            fix="give at least one token, for example the BOS id",
        )
    ids = as_tokens(np.asarray([prompt_ids]))
    check_ids(ids, jnp.full((1,), ids.shape[1], jnp.int32), config)
    wanted = sampling.max_tokens
    check_context(len(prompt_ids) + (1 if wanted is None else wanted), config)
    return config.max_context - len(prompt_ids) if wanted is None else wanted


def _prepared(
    sampling: SamplingParams, tokenizer: Tokenizer | None, room: int, num_top: int
) -> SamplingParams:
    """Return the request with its lengths decided and its banned words as token ids."""
    if sampling.echo or sampling.prompt_logprobs is not None:
        raise InvalidSampling(
            f"echo={sampling.echo}, prompt_logprobs={sampling.prompt_logprobs}",
            why="a stream is the reply alone, without its prompt",
            fix="leave them out; score gives the log-probabilities of a prompt",
        )
    if sampling.n != 1:
        raise InvalidSampling(
            f"n={sampling.n}", why="a stream is one reply", fix="use generate(num_samples=n)"
        )
    if sampling.bad_words and tokenizer is None:
        raise InvalidSampling(
            f"bad_words={sampling.bad_words!r}",
            why="the model has no tokenizer to turn them into ids",
            fix="use bad_token_ids",
        )
    banned = banned_ids(sampling.bad_words, tokenizer)
    return dataclasses.replace(
        sampling,
        bad_words=(),
        bad_token_ids=(*sampling.bad_token_ids, *banned),
        max_tokens=room,
        logprobs=num_top,
        forced_token_ids=sampling.forced_token_ids[:room],
    )


def banned_ids(
    words: str | Sequence[str], tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Return the ids of words, each as it is written at the start of a text and after a space."""
    if tokenizer is None:
        return ()
    forms = [form for word in words for form in (word, f" {word.lstrip()}")]
    found = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms]
    return tuple(ids for ids in found if ids)


def _bucket(length: int, smallest: int) -> int:
    """Return the power of two, at least `smallest`, that holds `length`."""
    return max(smallest, 1 << (length - 1).bit_length())


def _prefill(
    model: Model, prompt_ids: list[int], cache: KVCache, tables: tuple[Array, ...], exec: Exec
) -> tuple[Float[Array, "B V"], KVCache]:
    """Run the prompt in chunks; the last one is padded to its bucket."""
    chunk, output = exec.prefill_chunk, None
    for begin in range(0, len(prompt_ids), chunk):
        part = prompt_ids[begin : begin + chunk]
        width = min(chunk, _bucket(len(part), SMALLEST_BUCKET))
        inputs = make_inputs(
            np.pad(np.asarray([part], np.int32), ((0, 0), (0, width - len(part)))),
            lengths=len(part),
            starts=begin,
            block_tables=tables,
        )
        output, cache = extend(model.params, model.config, cache, inputs, exec=exec)
        raise_for_status(output.status)
    if output is None:
        raise InvalidInput("empty prompt", fix="give at least one token")
    return output.values, cache


def _first_state(
    prompt_ids: list[int],
    sampling: SamplingParams,
    tables: tuple[Array, ...],
    capacity: int,
    config: ModelConfig,
) -> DecodeState:
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    history = np.zeros((1, capacity), np.int32)
    history[0, : len(prompt_ids)] = prompt_ids
    forced = np.full((1, capacity), -1, np.int32)
    forced[0, : len(sampling.forced_token_ids)] = sampling.forced_token_ids
    return init_state(
        jnp.asarray(history),
        jnp.asarray([len(prompt_ids)], jnp.int32),
        keys=seed_keys([seed]),
        sampling=sampling_arrays([sampling], vocab_size=config.vocab_size, eos_ids=config.eos_ids),
        block_tables=tables,
        room=0,
        forced=jnp.asarray(forced) if sampling.forced_token_ids else None,
    )


def _grown(cache: KVCache, state: DecodeState, capacity: int) -> tuple[KVCache, DecodeState]:
    """Return cache and state with room for `capacity` tokens in all."""
    num_pages = -(-capacity // page_size_of(cache))
    more = num_pages + 1 - num_pages_of(cache)[0]
    grown = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2))), cache
    )
    extra = capacity - state.sample.history.shape[1]
    history = jnp.pad(state.sample.history, ((0, 0), (0, extra)))
    return grown, dataclasses.replace(
        state,
        sample=dataclasses.replace(state.sample, history=history),
        block_tables=(row_tables(1, num_pages),) * len(cache.groups),
    )


def _event(
    output: StepOutput,
    state: DecodeState,
    num_before: int,
    stop_ids: frozenset[int],
    num_chosen: int,
) -> StreamEvent:
    """Read one dispatch of the only row, which had drawn `num_before` tokens before it."""
    raise_for_status(output.status)
    drawn = jax.tree.map(lambda x: np.asarray(x[0]), output.values)
    if drawn.tokens.ndim == 0:
        drawn = jax.tree.map(lambda x: x[None], drawn)
    count = int(state.sample.history_len[0] - state.sample.prompt_len[0]) - num_before
    token_ids = drawn.tokens[:count].tolist()
    reason = None
    if bool(state.done[0]):
        reason = "stop" if token_ids and token_ids[-1] in stop_ids else "length"
    return StreamEvent(
        token_ids=token_ids,
        logprobs=drawn.logprobs[:count].tolist(),
        sampled_logprobs=drawn.sampled_logprobs[:count].tolist(),
        top_ids=drawn.top_ids[:count].tolist(),
        top_logprobs=drawn.top_logprobs[:count].tolist(),
        chosen_logprobs=drawn.chosen_logprobs[:count, :num_chosen].tolist(),
        finish_reason=reason,
    )
