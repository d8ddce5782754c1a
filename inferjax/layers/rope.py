"""Rotary position embedding: the frequencies of every scaling rule, and the rotation.

Source: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753. The rules'
details follow Hugging Face transformers (modeling_rope_utils), whose float32 order of operations is
kept.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from inferjax.config import Rope
from inferjax.pytree import pytree


@pytree
class Rotation:
    """Cosines and sines of every pair's angle, float32, for the tokens of a step.

    They depend on positions alone: all layers with the same rope share them.
    """

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


def rotation(positions: Int[Array, "B T"], rope: Rope) -> Rotation:
    """Return the rotation of tokens; negative positions, which are padding, count as 0.

    Angles are float32: at position 2**17 that of a fast pair is good to 0.008 rad, as in Hugging
    Face.
    """
    frequencies, scale = inverse_frequencies(rope)
    known = jnp.maximum(positions, 0)
    angles = known[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    # XLA on the CPU would compute them anew wherever they are used, for every head.
    cos, sin = lax.optimization_barrier((cos, sin))
    return Rotation(cos=cos, sin=sin)


def rotate(x: Float[Array, "B T *heads H"], by: Rotation) -> Float[Array, "B T *heads H"]:
    """Rotate as many leading dimensions of every head as `by` has angles for.

    Dimension i is paired with i + dim/2. Products are float32, the result has x's dtype.
    """
    axes = tuple(range(2, x.ndim - 1))
    return _rotated(x, jnp.expand_dims(by.cos, axes), jnp.expand_dims(by.sin, axes))


def turn(x: Float[Array, "*tokens H"], distance: int, rope: Rope) -> Float[Array, "*tokens H"]:
    """Move keys that have been rotated already on by `distance` positions, or back.

    The factor that a scaling rule puts on cos and sin is in them: it is not applied again.
    """
    frequencies, _ = inverse_frequencies(rope)
    angles = distance * frequencies.astype(np.float64).reshape((1,) * (x.ndim - 1) + (-1,))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return _rotated(x, jnp.asarray(cos), jnp.asarray(sin))


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate as many pairs as there are angles, in float32; further dimensions stay.

    Halves are an axis of their own, reversed: XLA makes one loop of it, and three of their sum.
    """
    dim = 2 * cos.shape[-1]
    pairs = x[..., :dim].astype(jnp.float32).reshape(*x.shape[:-1], 2, dim // 2)
    cos, sin = cos[..., None, :], jnp.stack([-sin, sin], axis=-2)
    rotated = (pairs * cos + pairs[..., ::-1, :] * sin).reshape(*x.shape[:-1], dim).astype(x.dtype)
    kept = x[..., dim:]
    return jnp.concatenate([rotated, kept], axis=-1) if kept.shape[-1] else rotated


def inverse_frequencies(rope: Rope) -> tuple[Float32[np.ndarray, " half"], float]:
    """Return the angle per position of every pair, and the factor on cos and sin.

    "dynamic" and "longrope", which Hugging Face recomputes whenever a longer sequence arrives, are
    fixed at `max_context`: a token's rotation never depends on how long its sequence has become.
    """
    match rope.scaling:
        case "none":
            return _plain(rope.theta, rope.dim), 1.0
        case "linear":
            return _plain(rope.theta, rope.dim) / np.float32(rope.factor), 1.0
        case "dynamic":
            return _plain(_stretched_theta(rope), rope.dim), 1.0
        case "llama3":
            return _llama3(rope), 1.0
        case "yarn":
            return _yarn(rope), _yarn_attention_factor(rope)
        case "longrope":
            return _longrope(rope), _longrope_attention_factor(rope)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _powers(theta: float, dim: int) -> Float32[np.ndarray, " half"]:
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.power(np.float32(theta), exponents, dtype=np.float32)


def _plain(theta: float, dim: int) -> Float32[np.ndarray, " half"]:
    return np.float32(1.0) / _powers(theta, dim)


def _stretched_theta(rope: Rope) -> float:
    """Return the base that reaches `max_context`; unchanged up to the original context."""
    longest = max(rope.max_context, rope.original_context)
    stretch = rope.factor * longest / rope.original_context - (rope.factor - 1.0)
    return rope.theta * stretch ** (rope.dim / (rope.dim - 2))


def _llama3(rope: Rope) -> Float32[np.ndarray, " half"]:
    """Divide slow pairs by the factor, keep fast ones, blend those that lie between."""
    plain = _plain(rope.theta, rope.dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = np.float32(rope.original_context) / (np.float32(2 * math.pi) / plain)
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return ((1 - blend) * plain / np.float32(rope.factor) + blend * plain).astype(np.float32)


def _yarn(rope: Rope) -> Float32[np.ndarray, " half"]:
    """Blend stretched and plain frequencies by how often a pair turns in the old context."""
    powers = _powers(rope.theta, rope.dim)
    plain = np.float32(1.0) / powers
    stretched = np.float32(1.0) / (np.float32(rope.factor) * powers)
    low, high = _turning_dim(rope, rope.beta_fast), _turning_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    keep = 1 - np.clip((pairs - np.float32(low)) / np.float32(width), 0.0, 1.0)
    return (stretched * (1 - keep) + plain * keep).astype(np.float32)


def _turning_dim(rope: Rope, turns: float) -> float:
    """Return the (fractional) pair that turns `turns` times within the original context."""
    ratio = rope.original_context / (turns * 2 * math.pi)
    return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        numerator = yarn_mscale(rope.factor, rope.mscale)
        return numerator / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def _longrope(rope: Rope) -> Float32[np.ndarray, " half"]:
    long = rope.max_context > rope.original_context
    factors = np.asarray(rope.long_factor if long else rope.short_factor, np.float32)
    return np.float32(1.0) / (factors * _powers(rope.theta, rope.dim))


def _longrope_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
