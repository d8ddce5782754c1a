"""Checks of what callers hand in: shapes always, values when they are not traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from inferjax.config import Exec, ModelConfig
from inferjax.errors import (
    InferjaxError,
    InvalidInput,
    InvalidSampling,
    NonFiniteLogits,
    OutOfPages,
    RequestTooLong,
    ShapeError,
)
from inferjax.params import Params
from inferjax.sampling import Status

PROBLEMS: dict[Status, tuple[type[InferjaxError], str, str]] = {
    Status.EMPTY_PROMPT: (InvalidInput, "empty prompt", "give every row at least one token"),
    Status.BAD_TOKEN: (
        InvalidInput,
        "token id outside the vocabulary",
        "encode the text with this model's tokenizer",
    ),
    Status.OUT_OF_PAGES: (
        OutOfPages,
        "the block table has no valid page for a token",
        "give the row more pages, or fewer tokens",
    ),
    Status.TOO_LONG: (
        RequestTooLong,
        "tokens beyond the model's context",
        "shorten the prompt, or draw fewer tokens",
    ),
    Status.BAD_LENGTH: (
        InvalidInput,
        "a negative length or start, or a length beyond the row's tokens",
        "give lengths from 0 to the width of tokens, and starts from 0",
    ),
    Status.BAD_SAMPLING: (
        InvalidSampling,
        "a sampling value is NaN or out of range",
        "see SamplingParams for the ranges",
    ),
    Status.ALL_MASKED: (
        InvalidSampling,
        "the constraints leave no token to draw",
        "relax allowed ids, banned words or the token mask",
    ),
    Status.NAN_LOGITS: (
        NonFiniteLogits,
        "the model's logits are not finite",
        "check the weights; float16 overflows in some models, try bfloat16 or float32",
    ),
}


def raise_for_status(status: Any) -> None:
    """Raise the error of the first row with a problem; return if all rows are fine."""
    bits = np.asarray(status).reshape(-1)
    for row in np.flatnonzero(bits):
        raise error_for_status(int(bits[row]), f"row {row}")


def error_for_status(bits: int, name: str) -> InferjaxError:
    """Return the error for the status bits of what `name` says: a row, or a request."""
    status = Status(bits)
    unknown = (InferjaxError, "unknown status", "use the status of one of this package's steps")
    found = (entry for flag, entry in PROBLEMS.items() if flag in status)
    kind, what, fix = next(found, unknown)
    return kind(f"{name}: {what}", why=f"status {status!r}", fix=fix)


def as_tokens(tokens: Any) -> Int[Array, "B T"]:
    """Return int32 tokens [B, T].

    Raises: ShapeError; InvalidInput for no tokens, or for concrete ids that int32 cannot hold.
    """
    array = as_integers(tokens, "tokens")
    if array.ndim != 2:
        raise ShapeError(
            f"tokens are {array.dtype}{list(array.shape)}",
            why="a batch of token ids is an integer array [batch, tokens]",
            fix="pad the prompts to one length and pass lengths=",
        )
    if 0 in array.shape:
        raise InvalidInput(
            f"tokens have shape {list(array.shape)}",
            why="there is nothing to predict from an empty prompt",
            fix="give every row at least one token, for example the BOS id",
        )
    return array


def as_lengths(lengths: Any, tokens: Int[Array, "B T"]) -> Int[Array, " B"]:
    """Return int32 lengths [B], all of `tokens` by default; concrete ones must be in [1, T]."""
    batch, width = tokens.shape
    array = as_rows(width if lengths is None else lengths, "lengths", batch)
    if is_concrete(array):
        values = np.asarray(array)
        if values.min() < 1 or values.max() > width:
            raise InvalidInput(
                f"lengths are in [{values.min()}, {values.max()}]",
                why=f"a row has between 1 and {width} tokens",
                fix="drop empty prompts, and pad tokens to the longest row",
            )
    return array


def as_rows(values: Any, name: str, batch: int) -> Int[Array, " B"]:
    """Return int32 [B] from one integer, or one per row.

    Raises: ShapeError, InvalidInput.
    """
    array = as_integers(values, name)
    if array.shape not in ((), (batch,)):
        raise ShapeError(
            f"{name} have shape {list(array.shape)}",
            why=f"there are {batch} rows",
            fix="give one integer, or one per row",
        )
    return jnp.broadcast_to(array, (batch,))


def as_integers(values: Any, name: str) -> Int[Array, "*axes"]:
    """Return an int32 array of values that are integers already; nothing is rounded or wrapped.

    Raises: ShapeError for ragged, fractional or other values, InvalidInput beyond int32.
    """
    return jnp.asarray(host_integers(values, name), jnp.int32)


def host_integers(values: Any, name: str) -> Any:
    """Check like `as_integers`, and return a NumPy array, or the jax array that was given.

    Making a jax array compiles a program for every new shape; who only wants ids does not.

    Raises: as `as_integers`.
    """
    try:
        array = values if isinstance(values, jax.Array) else np.asarray(values)
    except ValueError:
        array = np.asarray(None)
    traced = isinstance(array, jax.Array)
    whole = jnp.issubdtype(array.dtype, jnp.integer) if traced else array.dtype.kind in "iu"
    if not whole and array.size:
        raise ShapeError(
            f"{name} are not an array of integers, but {type(values).__name__}[{array.dtype}]",
            why="ids, lengths and tables are integers, in rows of one length",
            fix="pad ragged rows, and convert explicitly",
        )
    limits = np.iinfo(np.int32)
    if not traced and array.size:
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise InvalidInput(
                f"{name} are in [{low}, {high}]", why="they do not fit int32", fix="check the ids"
            )
    return array


def check_count(name: str, value: Any, smallest: int) -> None:
    """Refuse a size that is not an integer of at least `smallest`.

    Raises: InvalidInput.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < smallest:
        raise InvalidInput(
            f"{name}={value!r}",
            why=f"it is a size: an integer of at least {smallest}",
            fix="give a Python int",
        )


def check_kinds(params: Any, config: Any, exec: Any) -> None:
    """Refuse arguments of another kind, swapped ones above all.

    Raises: ShapeError.
    """
    wanted = {"params": (params, Params), "config": (config, ModelConfig), "exec": (exec, Exec)}
    for name, (value, kind) in wanted.items():
        if not isinstance(value, kind):
            raise ShapeError(
                f"{name} is a {type(value).__name__}",
                why=f"it must be a {kind.__name__}",
                fix="call with (model.params, model.config, ...) and exec=Exec(...)",
            )


def check_ids(tokens: Int[Array, "B T"], lengths: Int[Array, " B"], config: ModelConfig) -> None:
    """Refuse concrete token ids outside the vocabulary (traced ones are reported by status)."""
    if not (is_concrete(tokens) and is_concrete(lengths)):
        return
    ids = np.asarray(tokens)
    live = np.arange(ids.shape[1])[None] < np.asarray(lengths)[:, None]
    bad = np.argwhere(live & ((ids < 0) | (ids >= config.vocab_size)))
    if len(bad):
        row, column = bad[0]
        raise InvalidInput(
            f"token id {ids[row, column]} at row {row}, position {column}",
            why=f"the vocabulary has {config.vocab_size} ids",
            fix="encode the text with this model's tokenizer",
        )


def check_context(num_tokens: int, config: ModelConfig) -> None:
    """Refuse more positions than the model was built for.

    Raises: RequestTooLong.
    """
    if num_tokens > config.max_context:
        raise RequestTooLong(
            f"{num_tokens} tokens are asked for",
            why=f"the model's context is {config.max_context} tokens",
            fix="shorten the prompt, ask for fewer tokens, or load with a larger max_context",
            num_tokens=num_tokens,
            limit=config.max_context,
        )


def longest(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> int:
    """Return the longest row's length, or the padded width while lengths are traced."""
    return int(np.max(np.asarray(lengths))) if is_concrete(lengths) else tokens.shape[1]


def as_row_keys(key: Any, batch: int) -> Array:
    """Return typed keys [B]: the caller's own, or one key folded with each row's index.

    Raises: ShapeError for another number of keys, InvalidSampling for something else.
    """
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed:
        raw = isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32
        if not (raw and key.ndim and key.shape[-1] == 2):
            raise InvalidSampling(
                f"key is {type(key).__name__} {key!r}",
                why="randomness comes from a JAX key",
                fix="pass jax.random.key(seed), or SamplingParams(seed=...) without a key",
            )
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if key.shape == (batch,):
        return key
    if key.shape == ():
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))
    raise ShapeError(
        f"key has shape {list(key.shape)}",
        why=f"there are {batch} rows",
        fix="pass one key, or one key per row",
    )


def is_concrete(array: Array) -> bool:
    """Return whether the values can be read now, without forcing a traced computation."""
    return not isinstance(array, Tracer) and array.is_fully_addressable
