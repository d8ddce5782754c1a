"""The definition of correct: gather every page of a row, then one plain softmax in float32."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention import codes


def paged_attention(
    q: Float[Array, "B T K G W"],
    pool: Num[Array, "L P K C S W"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, "K G"] | None,
    factors: Float[Array, "L P K 2 S"] | None = None,
    lse: bool = False,
) -> Any:
    """Compute paged attention the slow and obvious way; see the package for the contract."""
    pages = pool[layer][block_table]  # [B, M, K, C, S, W]
    if factors is not None:
        pages = _decoded(pages, factors[layer][block_table], value_dim)
    batch, num_pages, heads, planes, size, width = pages.shape
    dense = pages.transpose(0, 2, 3, 1, 4, 5).reshape(batch, heads, planes, num_pages * size, width)
    key_pos = jnp.arange(num_pages * size, dtype=jnp.int32)
    distance = positions[:, :, None] - key_pos[None, None]
    seen = (key_pos[None] < lengths[:, None])[:, None] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    live = jnp.any(seen, axis=1)
    dense = jnp.where(live[:, None, None, :, None], dense.astype(jnp.float32), 0.0)
    keys, values = dense[:, :, 0], dense[:, :, -1, :, :value_dim]
    scores = jnp.einsum("BTKGW,BKSW->BTKGS", q.astype(jnp.float32), keys) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32)[None, None, :, :, None], (*scores.shape[:4], 1)
        )
        scores = jnp.concatenate([scores, sink], axis=-1)
    peak = jnp.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("BTKGS,BKSW->BTKGW", weights[..., : num_pages * size], values)
    out = jnp.where(positions[:, :, None, None, None] >= 0, out, 0.0).astype(q.dtype)
    if not lse:
        return out
    whole = jnp.log(jnp.where(total == 0.0, 1.0, total)) + peak
    return out, jnp.where(total == 0.0, -jnp.inf, whole)[..., 0]


def _decoded(
    pages: Num[Array, "B M K C S W"], factors: Float[Array, "B M K 2 S"], value_dim: int
) -> Float[Array, "B M K C S W"]:
    tokens = codes.decode(pages.swapaxes(3, 4), factors.swapaxes(3, 4), value_dim=value_dim)
    return tokens.swapaxes(3, 4)
