"""Multi-head latent attention in its absorbed form: the cache holds one latent and one rotary key.

Queries are mapped into the latent space, so this is grouped-query attention with a single key head
of width rank + rope, whose values are the first `rank` columns of its keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inferjax.config import LatentAttention
from inferjax.layers.context import Dense, Mask, Paged, attend
from inferjax.layers.heads import heads_of
from inferjax.layers.norm import normalize
from inferjax.layers.rope import Rotation, rotate, turn
from inferjax.params import LatentParams
from inferjax.quant.linear import linear


def latent_attention[C: (Dense, Paged)](
    x: Float[Array, "B T D"],
    w: LatentParams,
    spec: LatentAttention,
    context: C,
    group: int,
    layer: int | Int[Array, ""],
    rotation: Rotation,
) -> tuple[Float[Array, "B T D"], C]:
    """Compress, attend in latent space, expand; returns the context with the new latents in it.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """
    low = x
    if w.wq_a is not None and w.q_norm is not None:
        low = normalize(linear(x, w.wq_a, "BTD,DR->BTR", w.bq_a), w.q_norm, spec.norm)
    q = linear(low, w.wq, "BTR,RNH->BTNH")
    q_rope = rotate(q[..., spec.nope_dim :], rotation)
    q_latent = linear(q[..., : spec.nope_dim], w.wk_b, "BTNH,NHR->BTNR")
    compressed = linear(x, w.wkv_a, "BTD,DR->BTR", w.bkv_a)
    latent = normalize(compressed[..., : spec.kv_rank], w.kv_norm, spec.norm)
    k_rope = rotate(compressed[..., spec.kv_rank :], rotation)
    out, context = attend(
        context,
        jnp.concatenate([q_latent, q_rope], axis=-1)[:, :, None],
        jnp.concatenate([latent, k_rope], axis=-1)[:, :, None, None],
        Mask(scale=spec.scale, value_dim=spec.kv_rank),
        group,
        layer,
        heads_of(w.wk_b, latent=True),
    )
    values = linear(out[:, :, 0], w.wv_b, "BTNR,NRH->BTNH")
    return linear(values, w.wo, "BTNH,NHD->BTD", w.bo), context


def turn_latents(
    latents: Float[Array, "*tokens W"], spec: LatentAttention, distance: int
) -> Float[Array, "*tokens W"]:
    """Return latents as if their tokens stood `distance` positions further on: only rope moves."""
    rotated = turn(latents[..., spec.kv_rank :], distance, spec.rope)
    return jnp.concatenate([latents[..., : spec.kv_rank], rotated], axis=-1)
