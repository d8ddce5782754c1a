"""Rotary position embedding: the frequencies of every scaling rule, and the rotation.

Source: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753. The rules'
details follow Hugging Face transformers (modeling_rope_utils), whose float32 order of operations is
kept.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from inferjax.config import Rope


def apply_rope(
    x: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T *heads H"]:
    """Rotate the first `rope.dim` dimensions of every head by its token's position.

    Dimension i is paired with i + dim/2. Angles and products are float32: at position 2**17 the
    angle of a fast pair is good to 0.008 rad, as in Hugging Face. The result has x's dtype.
    """
    frequencies, scale = inverse_frequencies(rope)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None]
    angles = jnp.expand_dims(angles, tuple(range(2, x.ndim - 1)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return _rotated(x, cos, sin)


def turn(x: Float[Array, "*tokens H"], distance: int, rope: Rope) -> Float[Array, "*tokens H"]:
    """Move keys that have been rotated already on by `distance` positions, or back.

    The factor that a scaling rule puts on cos and sin is in them: it is not applied again.
    """
    frequencies, _ = inverse_frequencies(rope)
    angles = distance * frequencies.astype(np.float64).reshape((1,) * (x.ndim - 1) + (-1,))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return _rotated(x, jnp.asarray(cos), jnp.asarray(sin))


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate as many pairs as there are angles, in float32; further dimensions stay."""
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    kept = [x[..., 2 * half :]] if 2 * half < x.shape[-1] else []
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), *kept], axis=-1)


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
