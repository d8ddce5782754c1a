"""Paged attention as a loop over pages in plain XLA; no temporary exceeds a page per row.

A gather of the whole context reads, writes and reads again every key (measured on a CPU at 1 GB/s
of cache, this loop at 7). A page that is masked for a row changes nothing in its running sums, bit
for bit, so the result does not depend on how long the row's neighbours are.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.paged_attention import codes
from pallas_kernels.unbatched import max_row, min_row

MASKED = -1e30

# Running maximum, sum of weights and weighted values of an online softmax, rows [B, K, G, T].
type Sums = tuple[Array, Array, Array]


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
    """Attend by online softmax, page after page; see the package for the contract."""
    attend_page = functools.partial(
        _attend_page,
        queries=q.transpose(0, 2, 3, 1, 4),
        pool=pool,
        factors=factors,
        layer=layer,
        block_table=block_table,
        positions=positions,
        lengths=lengths,
        scale=scale,
        value_dim=value_dim,
        window=window,
        softcap=softcap,
    )
    batch, tokens, heads, group, _ = q.shape
    rows = (batch, heads, group, tokens)
    start = (
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )
    first, last = _page_range(positions, lengths, window, pool.shape[4], block_table.shape[1])
    sums = lax.fori_loop(first, last, attend_page, start)
    peak, total, out = sums if sinks is None else _add_sinks(sums, sinks)
    some = jnp.where(total == 0.0, 1.0, total)
    out = (out / some[..., None]).transpose(0, 3, 1, 2, 4).astype(q.dtype)
    if not lse:
        return out
    whole = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log(some))
    return out, whole.transpose(0, 3, 1, 2)


def _page_range(
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    window: int | None,
    page_size: int,
    max_pages: int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the first page that any query sees, and the page after the last."""
    live = jnp.minimum(jnp.max(positions, axis=1) + 1, lengths)
    last = jnp.minimum((max_row(live) + page_size - 1) // page_size, max_pages)
    if window is None:
        return jnp.int32(0), last
    oldest = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max)
    return jnp.maximum(min_row(oldest) - window + 1, 0) // page_size, last


def _attend_page(
    index: int | Int[Array, ""],
    sums: Sums,
    *,
    queries: Float[Array, "B K G T W"],
    pool: Num[Array, "L P K C S W"],
    factors: Float[Array, "L P K 2 S"] | None,
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
) -> Sums:
    """Add one page of every row to the running sums."""
    peak, total, out = sums
    page_ids = lax.dynamic_index_in_dim(block_table, index, axis=1, keepdims=False)
    page = pool[jnp.full_like(page_ids, layer), page_ids]  # [B, K, C, S, W]
    scales = None if factors is None else factors[jnp.full_like(page_ids, layer), page_ids]
    key_pos = index * pool.shape[4] + jnp.arange(pool.shape[4], dtype=jnp.int32)
    in_row = key_pos[None] < lengths[:, None]
    scores = _scores(queries, page, scales, value_dim) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = _seen(key_pos, positions, in_row, window)
    live = jnp.any(seen, axis=1)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, MASKED)
    new_peak = jnp.maximum(peak, scores.max(-1))
    kept = jnp.exp(peak - new_peak)
    weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
    # A stale NaN behind the row's end, or in a page that its window has left and another row reads,
    # would survive multiplication by a weight of zero.
    values = jnp.where(live[:, None, :, None], page[:, :, -1, :, :value_dim], 0)
    total = total * kept + weights.sum(-1)
    if scales is not None:
        # A NaN is a factor, seldom a code: what a query does not see cannot reach it.
        scale_of_values = scales[:, :, page.shape[2] - 1, None, None].astype(jnp.float32)
        weights = jnp.where(seen, weights * scale_of_values, 0.0)
        values = codes.to_float(values, queries.dtype)
    added = jnp.einsum(
        "BKGTS,BKSW->BKGTW",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return new_peak, total, out * kept[..., None] + added


def _scores(
    queries: Float[Array, "B K G T W"],
    page: Num[Array, "B K C S W"],
    scales: Float[Array, "B K 2 S"] | None,
    value_dim: int,
) -> Float[Array, "B K G T S"]:
    """Return products of queries and keys; those with codes are multiplied with their factors."""

    def product(queries: Array, keys: Array) -> Array:
        return jnp.einsum("BKGTW,BKSW->BKGTS", queries, keys, preferred_element_type=jnp.float32)

    if scales is None:
        return product(queries, page[:, :, 0])
    keys = codes.to_float(page[:, :, 0], queries.dtype)
    first, rest = jnp.moveaxis(scales.astype(jnp.float32)[:, :, :, None, None], 2, 0)
    if page.shape[2] == 2:
        return product(queries, keys) * first
    ends = product(queries[..., value_dim:], keys[..., value_dim:]) * rest
    return product(queries[..., :value_dim], keys[..., :value_dim]) * first + ends


def _seen(
    key_pos: Int[Array, " S"],
    positions: Int[Array, "B T"],
    in_row: Bool[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    distance = positions[:, :, None] - key_pos[None, None]
    seen = in_row[:, None] & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def _add_sinks(sums: Sums, sinks: Float[Array, "K G"]) -> Sums:
    peak, total, out = sums
    sink = sinks.astype(jnp.float32)[None, :, :, None]
    new_peak = jnp.maximum(peak, sink)
    kept = jnp.exp(peak - new_peak)
    return new_peak, total * kept + jnp.exp(sink - new_peak), out * kept[..., None]
