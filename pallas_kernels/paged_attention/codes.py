"""Keys and values in eight bits: a code for every number, and two factors for every token's head.

What a code stands for is multiplied with a factor. Keys have one and values another; a latent,
which is both, has one for its value columns and one for the rest, whose sizes have nothing to do
with each other. Codes are int8, from -127 to 127, or the bytes (uint8) of float8_e4m3fn: XLA on a
CPU computes with float8 by way of float16, and would convert a whole pool for every token written.

A factor is bfloat16, with the range of float32 at half its size. Codes are those of the rounded
factor, so its rounding makes steps up to 0.4 % larger and adds no error of its own. What is not
finite makes its factor NaN, and a NaN factor makes everything of its token and head NaN; the codes
are finite always.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

# The largest number that a code stands for, by the codes' dtype.
LARGEST = {"int8": 127.0, "uint8": 448.0}
FACTOR_DTYPE = "bfloat16"
NUM_FACTORS = 2


def encode(
    values: Float[Array, "*tokens C W"], dtype: str, *, value_dim: int
) -> tuple[Integer[Array, "*tokens C W"], Float[Array, "*tokens 2"]]:
    """Return codes of a dtype in `LARGEST`, and their factors; the largest number is met best.

    Numbers that already are codes times factors keep their codes: the largest code is 127, or 448.
    """
    values, largest = values.astype(jnp.float32), LARGEST[dtype]
    # XLA's largest of some numbers on a CPU leaves out a NaN among them.
    sizes = jnp.where(jnp.isnan(values), jnp.inf, jnp.abs(values))
    peaks = _peaks(sizes, value_dim)
    factors = jnp.where(peaks < jnp.inf, peaks / largest, jnp.nan).astype(FACTOR_DTYPE)
    wide = _spread(factors, values.shape, value_dim)
    scaled = jnp.clip(jnp.where(wide > 0, values / wide, 0.0), -largest, largest)
    if dtype == "int8":
        return jnp.round(scaled).astype(jnp.int8), factors
    return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8), factors


def decode(
    codes: Integer[Array, "*tokens C W"], factors: Float[Array, "*tokens 2"], *, value_dim: int
) -> Float[Array, "*tokens C W"]:
    """Return the float32 numbers that codes and factors stand for."""
    return to_float(codes, jnp.float32) * _spread(factors, codes.shape, value_dim)


def to_float(codes: Integer[Array, "*axes"], dtype: Any) -> Float[Array, "*axes"]:
    """Return what codes stand for before factors; 16 bits hold all of them exactly."""
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(dtype)


def _peaks(sizes: Float[Array, "*tokens C W"], value_dim: int) -> Float[Array, "*tokens 2"]:
    if sizes.shape[-2] == 2:
        return sizes.max(-1)
    values, rest = sizes[..., 0, :value_dim], sizes[..., 0, value_dim:]
    return jnp.stack([values.max(-1), rest.max(-1, initial=0.0)], axis=-1)


def _spread(
    factors: Float[Array, "*tokens 2"], shape: tuple[int, ...], value_dim: int
) -> Float[Array, "*tokens C W"]:
    """Return the factor of every number, as far as it differs along the width."""
    factors = factors.astype(jnp.float32)
    if shape[-2] == 2:
        return factors[..., None]
    widths = (value_dim, shape[-1] - value_dim)
    columns = [
        jnp.broadcast_to(factors[..., i : i + 1], (*factors.shape[:-1], width))
        for i, width in enumerate(widths)
    ]
    return jnp.concatenate(columns, axis=-1)[..., None, :]
