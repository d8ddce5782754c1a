"""Requests as arrays, one row each, built on the host in one place."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from inferjax.sampling.arrays import NO_LIMIT, Sampling
from inferjax.sampling.params import SamplingParams
from inferjax.sampling.widths import Widths, bad_sequences, bias_pairs, check_ids, check_request

_COLUMNS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "min_tokens": np.int32,
    "ignore_eos": np.bool_,
}


def sampling_arrays(
    params: Sequence[SamplingParams],
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    widths: Widths | None = None,
) -> Sampling:
    """Turn requests into arrays on the device: `sampling_rows`, transferred.

    Raises: InvalidSampling.
    """
    rows = sampling_rows(params, vocab_size=vocab_size, eos_ids=eos_ids, widths=widths)
    return jax.tree.map(jnp.asarray, rows)


def sampling_rows(
    params: Sequence[SamplingParams],
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    widths: Widths | None = None,
) -> Sampling:
    """Turn requests into NumPy arrays, one row each, which a compiled function takes as they are.

    Lists are padded with -1 to `widths`; without, to the longest, rounded up to a power of two so
    that few shapes exist. A row reports as many top tokens as its `logprobs`, none for None.
    `bad_words`, being text, must have become `bad_token_ids`; text, `seed`, `n`, `prompt_logprobs`
    and `forced_token_ids` are for the caller.

    Raises: InvalidSampling, for ids outside the vocabulary, for `bad_words`, for lists beyond
        `widths`.
    """
    for row in params:
        check_request(row, vocab_size=vocab_size, widths=widths)
    check_ids("eos_ids", eos_ids, vocab_size)
    count = len(params)
    fields: dict[str, Any] = {
        name: np.fromiter((getattr(row, name) for row in params), dtype, count)
        for name, dtype in _COLUMNS.items()
    }
    limits = (NO_LIMIT if row.max_tokens is None else row.max_tokens for row in params)
    fields["max_tokens"] = np.fromiter(limits, np.int32, count)
    fields["num_top"] = np.fromiter((row.logprobs or 0 for row in params), np.int32, count)
    fields["eos_ids"] = np.tile(np.array(eos_ids, np.int32), (count, 1))
    return Sampling(**fields, **_lists(params, widths))


def seed_keys(seeds: Sequence[int]) -> Key[Array, " B"]:
    """Return one key per seed: `jax.random.key(seed)`, but keeping the bits from 2**32 up."""
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words.reshape(-1, 2)), impl="threefry2x32")


def _lists(params: Sequence[SamplingParams], widths: Widths | None) -> dict[str, Any]:
    pairs = [bias_pairs(row) for row in params]
    lists: dict[str, list[Sequence[int]]] = {
        "stop_ids": [row.stop_token_ids for row in params],
        "bias_ids": [[token for token, _ in row] for row in pairs],
        "allowed_ids": [row.allowed_token_ids or () for row in params],
        "logprob_ids": [row.logprob_token_ids for row in params],
    }
    fixed: dict[str, int | None] = dict.fromkeys(lists)
    if widths is not None:
        fixed = {
            "stop_ids": widths.stop_ids,
            "bias_ids": widths.bias,
            "allowed_ids": widths.allowed,
            "logprob_ids": widths.logprob_ids,
        }
    padded = {name: _padded(rows, np.int32, -1, fixed[name]) for name, rows in lists.items()}
    bias = _padded([[value for _, value in row] for row in pairs], np.float32, 0, fixed["bias_ids"])
    return {**padded, "bias": bias, "bad_words": _padded_words(params, widths)}


def _padded(rows: Sequence[Sequence[Any]], dtype: type, fill: int, width: int | None) -> np.ndarray:
    if width is None:
        width = _rounded(max(map(len, rows), default=0))
    padded = np.full((len(rows), width), fill, dtype)
    for index, row in enumerate(rows):
        if row:
            padded[index, : len(row)] = row
    return padded


def _padded_words(params: Sequence[SamplingParams], widths: Widths | None) -> np.ndarray:
    rows = [bad_sequences(row) for row in params]
    if widths is None:
        count = _rounded(max(map(len, rows), default=0))
        length = _rounded(max((len(word) for words in rows for word in words), default=1))
    else:
        count, length = widths.bad_words, widths.bad_word_len
    padded = np.full((len(rows), count, length), -1, np.int32)
    for index, words in enumerate(rows):
        for at, word in enumerate(words):
            padded[index, at, length - len(word) :] = word
    return padded


def _rounded(length: int) -> int:
    return 1 << (length - 1).bit_length() if length else 0
