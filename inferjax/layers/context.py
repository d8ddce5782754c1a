"""What the tokens of a step attend to: each other (`Dense`), or pages of a cache (`Paged`).

Both are arguments that travel through the layers and come back, never globals. `attend` is the one
place that knows the difference, so that every layer is written once.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from inferjax.errors import KernelUnavailable
from inferjax.kv.cache import KVCache, Pages, is_turned, locate, page_size_of, write
from inferjax.layers.heads import Heads, attend_on_mesh
from inferjax.pytree import pytree, static
from pallas_kernels import unavailable
from pallas_kernels.paged_attention import paged_attention

# Query rows per block of dense attention: bounds the scores to [B, K, G, 256, S].
QUERY_BLOCK = 256


@pytree
class Dense:
    """No cache: tokens of a row see earlier tokens of the same row.

    `positions [B, T]` are -1 at padding.
    """

    positions: Int[Array, "B T"]


@pytree
class Paged:
    """New tokens are written to the cache first, then attend to their row's pages.

    They too attend to each other as the cache holds them, rounded where it has fewer bits.

    `lengths` counts cached tokens including the new ones; `block_tables` has one per group, and so
    have `places`, the pages and offsets of new tokens. Make one with `paged`.
    """

    cache: KVCache
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    block_tables: tuple[Int[Array, "B M"], ...]
    places: tuple[tuple[Int[Array, "B T"], Int[Array, "B T"]], ...]
    implementation: str = static(default="auto")


def paged(
    cache: KVCache,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_tables: tuple[Int[Array, "B M"], ...],
    implementation: str,
) -> Paged:
    """Return the context of tokens at `positions`, once for all layers."""
    places = tuple(
        locate(
            table,
            positions,
            page_size=page_size_of(cache),
            num_pages=pool.values.shape[1],
        )
        for table, pool in zip(block_tables, cache.groups, strict=True)
    )
    return Paged(
        cache=cache,
        positions=positions,
        lengths=lengths,
        block_tables=block_tables,
        places=places,
        implementation=implementation,
    )


@pytree
class Mask:
    """How one layer limits what a query sees, and how it scales scores."""

    scale: float = static()
    value_dim: int = static()
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)
    sinks: Float[Array, "K G"] | None = None


def attend[C: (Dense, Paged)](
    context: C,
    q: Float[Array, "B T K G W"],
    kv: Float[Array, "B T K C W"],
    mask: Mask,
    group: int,
    layer: int | Int[Array, ""],
    heads: Heads | None = None,
) -> tuple[Float[Array, "B T K G Hv"], C]:
    """Attend from q to the context extended by `kv`; `layer` counts within the cache group.

    `heads` tells how a mesh cuts heads, where the weights know it: the kernels run on each device.

    Raises: KernelUnavailable where the implementation asked for cannot run.
    """
    if isinstance(context, Dense):
        return _attend_dense(context.positions, q, kv, mask), context
    pool = context.cache.groups[group]
    # Only a plain implementation that is asked for by name has its counterpart for writing.
    plain = context.implementation in ("xla", "reference")
    writer = context.implementation if plain else "auto"
    with _typed_errors(context.implementation):
        pool = write(
            pool,
            layer,
            kv,
            *context.places[group],
            value_dim=mask.value_dim,
            implementation=writer,
        )
    of_rows = (context.block_tables[group], context.positions, context.lengths)
    run = functools.partial(_attend_pages, implementation=context.implementation)
    out = attend_on_mesh(run, heads, q, pool, jnp.asarray(layer, jnp.int32), of_rows, mask)
    pools = context.cache.groups
    cache = KVCache(groups=(*pools[:group], pool, *pools[group + 1 :]))
    return out, dataclasses.replace(context, cache=cache)


def _attend_pages(
    q: Float[Array, "B T K G W"],
    pool: Pages,
    layer: Int[Array, ""],
    of_rows: tuple[Int[Array, "B M"], Int[Array, "B T"], Int[Array, " B"]],
    mask: Mask,
    *,
    implementation: str,
) -> Float[Array, "B T K G Hv"]:
    table, positions, lengths = of_rows
    with _typed_errors(implementation):
        return paged_attention(
            q,
            pool.values,
            layer,
            table,
            positions,
            lengths,
            scale=mask.scale,
            value_dim=mask.value_dim,
            window=mask.window,
            softcap=mask.softcap,
            sinks=mask.sinks,
            factors=pool.factors,
            turned=is_turned(pool),
            implementation=implementation,
        )


@contextlib.contextmanager
def _typed_errors(implementation: str) -> Iterator[None]:
    """Say which setting asked for a kernel that cannot run."""
    try:
        yield
    except unavailable.KernelUnavailable as error:
        raise KernelUnavailable(
            f"attention={implementation!r} cannot run",
            why=str(error),
            fix='use attention="auto", which takes what there is',
        ) from error


def _attend_dense(
    positions: Int[Array, "B T"], q: Array, kv: Array, mask: Mask
) -> Float[Array, "B T K G Hv"]:
    """Attend block by block of queries, recomputing scores in the backward pass."""
    tokens = q.shape[1]
    if tokens <= QUERY_BLOCK:
        return _attend_block(q, positions, kv, positions, mask)
    num_blocks = -(-tokens // QUERY_BLOCK)
    pad = num_blocks * QUERY_BLOCK - tokens
    blocks_q = _split(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0))), num_blocks)
    blocks_pos = _split(jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1), num_blocks)

    @jax.checkpoint
    def block(args: tuple[Array, Array]) -> Array:
        return _attend_block(*args, kv, positions, mask)

    out = lax.map(block, (blocks_q, blocks_pos))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], num_blocks * QUERY_BLOCK, *out.shape[3:])[:, :tokens]


def _split(x: Array, num_blocks: int) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], num_blocks, -1, *x.shape[2:]), 1, 0)


def _attend_block(
    q: Float[Array, "B T K G W"],
    q_pos: Int[Array, "B T"],
    kv: Float[Array, "B S K C W"],
    kv_pos: Int[Array, "B S"],
    mask: Mask,
) -> Float[Array, "B T K G Hv"]:
    keys, values = kv[:, :, :, 0], kv[:, :, :, -1, : mask.value_dim]
    scores = jnp.einsum("BTKGW,BSKW->BKGTS", q, keys, preferred_element_type=jnp.float32)
    scores = scores * mask.scale
    if mask.softcap is not None:
        scores = mask.softcap * jnp.tanh(scores / mask.softcap)
    scores = jnp.where(_seen(q_pos, kv_pos, mask.window)[:, None, None], scores, -1e30)
    peak = scores.max(-1, keepdims=True)
    sink = None
    if mask.sinks is not None:
        sink = mask.sinks.astype(jnp.float32)[None, :, :, None, None]
        peak = jnp.maximum(peak, sink)
    peak = lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - peak)
    out = jnp.einsum(
        "BKGTS,BSKW->BTKGW",
        (weights / total).astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return out.astype(q.dtype)


def _seen(
    q_pos: Int[Array, "B T"], kv_pos: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    distance = q_pos[:, :, None] - kv_pos[:, None]
    seen = (kv_pos >= 0)[:, None] & (distance >= 0)
    return seen if window is None else seen & (distance < window)
