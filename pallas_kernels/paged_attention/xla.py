"""Paged attention as a loop over pages in plain XLA: portable, no temporary larger than a page per row.

A gather of the whole context reads, writes and reads again every key (measured on a CPU at 1 GB/s of
cache, this loop at 7). A page that is masked for a row changes nothing in its running sums, bit for bit,
so the result does not depend on how long the row's neighbours are.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.unbatched import max_row, min_row

MASKED = -1e30


def paged_attention(
    q: Float[Array, "B T K G W"],
    pool: Float[Array, "L P K C S W"],
    layer: int,
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "B T K G Hv"]:
    """Attend by online softmax, page after page; see the package for the contract."""
    batch, tokens, heads, group, _ = q.shape
    size = pool.shape[4]
    queries = q.transpose(0, 2, 3, 1, 4)  # [B, K, G, T, W]
    layers = jnp.full((batch,), layer, jnp.int32)
    live = jnp.minimum(jnp.max(positions, axis=1) + 1, lengths)
    last = jnp.minimum((max_row(live) + size - 1) // size, block_table.shape[1])
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(min_row(oldest) - window + 1, 0) // size

    def attend_page(index, sums):
        peak, total, out = sums
        page_ids = lax.dynamic_index_in_dim(block_table, index, axis=1, keepdims=False)
        page = pool[layers, page_ids]  # [B, K, C, S, W]
        key_pos = index * size + jnp.arange(size, dtype=jnp.int32)
        in_row = key_pos[None] < lengths[:, None]
        scores = jnp.einsum(
            "BKGTW,BKSW->BKGTS", queries, page[:, :, 0], preferred_element_type=jnp.float32
        )
        scores = _capped(scores * scale, softcap)
        seen = _seen(key_pos, positions, in_row, window)[:, None, None]
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        kept = jnp.exp(peak - new_peak)
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        values = jnp.where(in_row[:, None, :, None], page[:, :, -1, :, :value_dim], 0)
        added = jnp.einsum(
            "BKGTS,BKSW->BKGTW",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return new_peak, total * kept + weights.sum(-1), out * kept[..., None] + added

    rows = (batch, heads, group, tokens)
    start = (
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )
    peak, total, out = lax.fori_loop(first, last, attend_page, start)
    if sinks is not None:
        total, out = _add_sinks(peak, total, out, sinks)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.transpose(0, 3, 1, 2, 4).astype(q.dtype)


def _seen(
    key_pos: Int[Array, " S"],
    positions: Int[Array, "B T"],
    in_row: Bool[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    distance = positions[:, :, None] - key_pos[None, None]
    seen = in_row[:, None] & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _add_sinks(peak: Array, total: Array, out: Array, sinks: Array) -> tuple[Array, Array]:
    sink = sinks.astype(jnp.float32)[None, :, :, None]
    new_peak = jnp.maximum(peak, sink)
    kept = jnp.exp(peak - new_peak)
    return total * kept + jnp.exp(sink - new_peak), out * kept[..., None]

