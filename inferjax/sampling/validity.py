"""Rows that cannot be sampled as asked: found, reported, and kept from harming others."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from inferjax.errors import ShapeError
from inferjax.sampling.arrays import SampleState, Sampling

_NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "bias_ids": -1,
    "allowed_ids": -1,
    "bad_words": -1,
    "token_mask": 0xFFFFFFFF,
}


def invalid_rows(sampling: Sampling, vocab_size: int) -> Bool[Array, " B"]:
    """Return which rows have a value outside its range, or an id outside the vocabulary.

    NaN fails every comparison, so each range is written as what must hold.
    """
    valid = (sampling.temperature >= 0.0) & (sampling.temperature < jnp.inf)
    valid &= (sampling.top_p > 0.0) & (sampling.top_p <= 1.0)
    valid &= (sampling.min_p >= 0.0) & (sampling.min_p <= 1.0)
    valid &= (sampling.repetition_penalty > 0.0) & (sampling.repetition_penalty < jnp.inf)
    valid &= jnp.abs(sampling.presence_penalty) <= 2.0
    valid &= jnp.abs(sampling.frequency_penalty) <= 2.0
    valid &= (sampling.top_k >= -1) & (sampling.min_tokens >= 0) & (sampling.max_tokens >= 0)
    valid &= jnp.all((sampling.bias_ids < 0) | jnp.isfinite(sampling.bias), axis=1)
    for name in ("eos_ids", "stop_ids", "bias_ids", "allowed_ids", "logprob_ids"):
        valid &= jnp.all(_in_range(getattr(sampling, name), vocab_size), axis=1)
    return ~(valid & jnp.all(_in_range(sampling.bad_words, vocab_size), axis=(1, 2)))


def neutral_rows(sampling: Sampling, rows: Bool[Array, " B"]) -> Sampling:
    """Make `rows` greedy and unconstrained."""

    def reset(value: Array, neutral: float | int) -> Array:
        chosen = rows.reshape(-1, *[1] * (value.ndim - 1))
        return jnp.where(chosen, jnp.asarray(neutral, value.dtype), value)

    present = {k: v for k, v in _NEUTRAL.items() if getattr(sampling, k) is not None}
    changes = {name: reset(getattr(sampling, name), value) for name, value in present.items()}
    return dataclasses.replace(sampling, **changes)


def check_shapes(logits: Any, sampling: Any, state: Any) -> None:
    """Refuse what is not floating-point logits with one row of everything else per row.

    Raises: ShapeError.
    """
    kinds = {"sampling": (sampling, Sampling), "state": (state, SampleState)}
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            raise ShapeError(
                f"{name} is a {type(value).__name__}",
                why=f"sample takes arrays, a {kind.__name__}",
                fix="build them with make_sampling or sampling_arrays, and make_state",
            )
    shape, dtype = getattr(logits, "shape", None), getattr(logits, "dtype", None)
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if shape is None or len(shape) != 2 or not shape[1] or not floating:
        raise ShapeError(
            f"logits are a {type(logits).__name__} of {dtype}, shape {shape}",
            why="sample takes one row of floating-point logits per sequence, [B, V]",
            fix="use vmap for further axes",
        )
    _check_mask(sampling.token_mask, shape[1])
    for owner in (sampling, state):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if value is not None and value.shape[:1] != logits.shape[:1]:
                raise ShapeError(
                    f"{type(owner).__name__}.{field.name} has shape {value.shape}",
                    why=f"the logits have {logits.shape[0]} rows",
                    fix="give every field one row per sequence",
                )


def _check_mask(mask: Any, vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    if mask is not None and (mask.dtype != jnp.uint32 or mask.shape[1:] != (words,)):
        raise ShapeError(
            f"token_mask is {mask.dtype} with {mask.shape[1:]} words a row",
            why=f"{vocab_size} ids take {words} words of 32 bits",
            fix="pack one bit per id into uint32, the lowest bit first",
        )


def _in_range(ids: Int[Array, "*lead"], vocab_size: int) -> Bool[Array, "*lead"]:
    return (ids >= -1) & (ids < vocab_size)
