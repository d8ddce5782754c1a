"""Grouped-query attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inferjax.config import Attention
from inferjax.layers.context import Dense, Mask, Paged, attend
from inferjax.layers.heads import heads_of
from inferjax.layers.norm import normalize
from inferjax.layers.rope import Rotation, rotate, turn
from inferjax.params import AttentionParams
from inferjax.quant.linear import linear


def attention[C: (Dense, Paged)](
    x: Float[Array, "B T D"],
    w: AttentionParams,
    spec: Attention,
    context: C,
    group: int,
    layer: int | Int[Array, ""],
    rotation: Rotation | None,
) -> tuple[Float[Array, "B T D"], C]:
    """Project, rotate, attend and project back; returns the context with this layer's keys in it.

    Source: grouped-query attention, arXiv 2305.13245.
    """
    num_groups = spec.q_per_kv
    qkv = linear(x, w.wqkv, "BTD,DKCH->BTKCH", w.bqkv)
    q, k, v = qkv[:, :, :, :num_groups], qkv[:, :, :, num_groups], qkv[:, :, :, num_groups + 1]
    if spec.qk_norm is not None and w.q_norm is not None and w.k_norm is not None:
        q_axes, k_axes = (3, 2) if spec.qk_norm_span == "all_heads" else (1, 1)
        q = normalize(q, w.q_norm, spec.qk_norm, num_axes=q_axes)
        k = normalize(k, w.k_norm, spec.qk_norm, num_axes=k_axes)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    mask = Mask(
        scale=spec.scale,
        value_dim=spec.head_dim,
        window=spec.window,
        softcap=spec.softcap,
        sinks=w.sinks,
    )
    kv, heads = jnp.stack([k, v], axis=3), heads_of(w.wqkv)
    out, context = attend(context, q, kv, mask, group, layer, heads)
    return linear(out, w.wo, "BTKGH,KGHD->BTD", w.bo), context


def turn_keys(
    keys: Float[Array, "*tokens H"], spec: Attention, distance: int
) -> Float[Array, "*tokens H"]:
    """Return keys as if their tokens stood `distance` positions further on."""
    return keys if spec.rope is None else turn(keys, distance, spec.rope)
