"""What `generate` is asked for, as arrays; what arrays cannot honour is refused, never ignored."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidSampling, ShapeError
from inferjax.runtime.arguments import as_row_keys, is_concrete
from inferjax.sampling import (
    GREEDY_BELOW,
    Sampling,
    SamplingParams,
    make_sampling,
    sampling_arrays,
    seed_keys,
)


def sampling_of(sampling: Any, batch: int, config: ModelConfig, exec: Exec) -> Sampling:
    """Return one row of settings per prompt; None is greedy.

    A `SamplingParams` reports `exec.top_logprobs` tokens; rows of `Sampling` decide for themselves.

    Raises: ShapeError, InvalidSampling.
    """
    if sampling is None:
        return make_sampling(batch, temperature=0.0, eos_ids=config.eos_ids)
    if isinstance(sampling, Sampling):
        return _own_rows(sampling, batch, config)
    if not isinstance(sampling, SamplingParams):
        raise InvalidSampling(
            f"sampling is a {type(sampling).__name__}",
            why="it must be a SamplingParams, a Sampling or None",
            fix="SamplingParams.from_mapping builds one from a dict",
        )
    _check_request(sampling, exec)
    request = dataclasses.replace(sampling, logprobs=exec.top_logprobs)
    vocab_size, eos_ids = config.vocab_size, config.eos_ids
    rows = sampling_arrays([request] * batch, vocab_size=vocab_size, eos_ids=eos_ids)
    wanted = rows.logprob_ids[:, : len(sampling.logprob_token_ids)]
    return dataclasses.replace(rows, logprob_ids=wanted)


def forced_of(sampling: Any, batch: int, max_new_tokens: int) -> Int[Array, "B F"]:
    """Return the tokens that every output begins with, padded with -1; no columns for none."""
    ids = sampling.forced_token_ids if isinstance(sampling, SamplingParams) else ()
    ids = ids[:max_new_tokens]
    forced = np.full((batch, max_new_tokens if ids else 0), -1, np.int32)
    forced[:, : len(ids)] = ids
    return jnp.asarray(forced)


def keys_of(key: Any, sampling: Any, batch: int) -> Key[Array, " B"]:
    """Return one key per prompt; a seed gives every row the key of a request of its own.

    Raises: InvalidSampling, ShapeError.
    """
    seed = sampling.seed if isinstance(sampling, SamplingParams) else None
    if key is not None and seed is not None:
        raise InvalidSampling(
            f"both key and seed={seed}", why="one of them would be ignored", fix="leave one out"
        )
    if seed is not None:
        return seed_keys([seed] * batch)
    if key is None and not _is_greedy(sampling):
        raise InvalidSampling(
            "sampling without a key",
            why="drawing tokens needs randomness, and there is no hidden state to take it from",
            fix="pass key=jax.random.key(seed), or temperature=0",
        )
    return as_row_keys(jax.random.key(0) if key is None else key, batch)


def _own_rows(sampling: Sampling, batch: int, config: ModelConfig) -> Sampling:
    if sampling.temperature.shape != (batch,):
        raise ShapeError(
            f"sampling has {list(sampling.temperature.shape)} rows",
            why=f"there are {batch} prompts; samples of one prompt share its row",
            fix=f"make_sampling({batch}, ...)",
        )
    if sampling.eos_ids.shape[1] == 0:
        eos_ids = jnp.asarray(config.eos_ids, jnp.int32)
        eos_ids = jnp.broadcast_to(eos_ids, (batch, len(config.eos_ids)))
        sampling = dataclasses.replace(sampling, eos_ids=eos_ids)
    return sampling


def _check_request(sampling: SamplingParams, exec: Exec) -> None:
    """Refuse the fields of a request that a function of arrays cannot honour."""
    if sampling.stop or sampling.bad_words:
        raise InvalidSampling(
            "stop strings and bad words are text",
            why="generate sees token ids only",
            fix="use stop_token_ids and bad_token_ids, or the command line, which tokenizes them",
        )
    if sampling.echo or sampling.include_stop or not sampling.skip_special_tokens:
        raise InvalidSampling(
            "echo, include_stop and skip_special_tokens are about text",
            why="generate returns token ids only",
            fix="leave them out, and decode the tokens as you like",
        )
    if sampling.prompt_logprobs is not None:
        raise InvalidSampling(
            f"prompt_logprobs={sampling.prompt_logprobs} in the sampling of generate",
            why="generate reports what it draws",
            fix="call score(params, config, tokens)",
        )
    if sampling.n != 1:
        raise InvalidSampling(
            f"n={sampling.n} in the sampling of generate",
            why="the number of samples is a shape",
            fix=f"pass num_samples={sampling.n}",
        )
    if (sampling.logprobs or 0) > exec.top_logprobs:
        raise InvalidSampling(
            f"logprobs={sampling.logprobs} in the sampling of generate",
            why="how many are reported is a shape",
            fix=f"pass exec=Exec(top_logprobs={sampling.logprobs})",
        )


def _is_greedy(sampling: Sampling | SamplingParams | None) -> bool:
    """Return whether no row can need randomness; traced temperatures might."""
    if isinstance(sampling, Sampling):
        known = is_concrete(sampling.temperature)
        return known and bool(np.all(np.asarray(sampling.temperature) < GREEDY_BELOW))
    return sampling is None or sampling.temperature < GREEDY_BELOW
