"""The KV cache on the device: one pool of pages per cache group.

Only this file and the kernels know a pool's layout, `[L, P, K, C, S, W]`: layer, page, key/value
head, plane (keys, values), token in page, width. One page of one head is contiguous, which is what
a kernel copies at once. Page 0 is trash: padding rows write there, nobody reads it, and no sequence
ever owns it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from inferjax.config import KV_DTYPES, CacheGroup, Exec, ModelConfig, cache_groups
from inferjax.errors import OutOfPages, UnsupportedConfig
from inferjax.pytree import pytree

TRASH_PAGE = 0


@pytree
class KVCache:
    """All pages of all groups; donate it to every step and use only what the step returns."""

    groups: tuple[Float[Array, "L P K C S W"], ...]


def init_cache(
    config: ModelConfig,
    *,
    num_pages: int | Sequence[int],
    exec: Exec = Exec(),
    dtype: str | None = None,
) -> KVCache:
    """Allocate zeroed pools of `num_pages` pages (one number per group, or one for all).

    Page 0 is included in the count and never holds a sequence. `dtype` defaults to
    `exec.kv_dtype`, then to the config's dtype.

    Raises: OutOfPages when a pool would hold no page beside the trash page, UnsupportedConfig for
    another dtype.
    """
    shapes = cache_shapes(config, num_pages=num_pages, exec=exec)
    kind = dtype or exec.kv_dtype or config.dtype
    if kind not in KV_DTYPES:
        raise UnsupportedConfig(
            f"a cache of {kind!r}",
            why="it holds floating-point keys and values",
            fix=f"use one of {', '.join(KV_DTYPES)}",
        )
    try:
        return KVCache(groups=tuple(jnp.zeros(shape, kind) for shape in shapes))
    except jax.errors.JaxRuntimeError as error:
        wanted = sum(math.prod(shape) for shape in shapes) * jnp.dtype(kind).itemsize
        raise OutOfPages(
            f"a cache of {wanted / 1e9:.1f} GB does not fit the device",
            why=str(error).splitlines()[0],
            fix="ask for fewer pages, a shorter reply or a smaller kv_dtype",
            num_bytes=wanted,
        ) from error


def row_tables(batch: int, pages_per_row: int) -> Int[Array, "B M"]:
    """Return block tables that give each row consecutive pages of its own, from page 1 on."""
    pages = jnp.arange(batch * pages_per_row, dtype=jnp.int32)
    return TRASH_PAGE + 1 + pages.reshape(batch, pages_per_row)


def cache_shapes(
    config: ModelConfig, *, num_pages: int | Sequence[int], exec: Exec = Exec()
) -> tuple[tuple[int, ...], ...]:
    """Return the shape of every pool."""
    groups = cache_groups(config)
    counts: list[Any] = [num_pages] * len(groups)
    if isinstance(num_pages, list | tuple):
        counts = list(num_pages)
    if len(counts) != len(groups) or not all(_is_count(n) for n in counts):
        raise OutOfPages(
            f"num_pages is {num_pages!r} for {len(groups)} cache groups",
            why="every group needs the trash page and at least one page to use",
            fix="give one number >= 2, or one per group of config.cache_groups(model.config)",
        )
    sizes = [int(n) for n in counts]
    return tuple(_pool_shape(g, n, exec.page_size) for g, n in zip(groups, sizes, strict=True))


def token_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the cache bytes that one token takes, over all layers."""
    values = sum(math.prod(_pool_shape(g, 1, 1)) for g in cache_groups(config))
    return values * jnp.dtype(dtype).itemsize


def write(
    pool: Float[Array, "L P K C S W"],
    layer: int | Int[Array, ""],
    new: Float[Array, "B T K C W"],
    pages: Int[Array, "B T"],
    offsets: Int[Array, "B T"],
) -> Float[Array, "L P K C S W"]:
    """Store new tokens in place; a page id outside the pool is dropped, never clamped."""
    return pool.at[jnp.full_like(pages, layer), pages, :, :, offsets].set(
        new.astype(pool.dtype), mode="drop"
    )


def copy_pages(cache: KVCache, source: Int[Array, " N"], target: Int[Array, " N"]) -> KVCache:
    """Copy whole pages, in all groups and layers: what a shared, partly filled page needs."""
    return KVCache(groups=tuple(_copied(pool, source, target) for pool in cache.groups))


def copy_group_pages(
    cache: KVCache, source: Int[Array, " N"], target: Int[Array, " N"], *, group: int
) -> KVCache:
    """Copy whole pages of one group; pairs whose target is the trash page or -1 are padding."""
    pools = list(cache.groups)
    pools[group] = _copied(pools[group], source, target)
    return KVCache(groups=tuple(pools))


def rewrite_keys(
    pool: Float[Array, "L P K C S W"],
    layer: int,
    source: Int[Array, " N"],
    target: Int[Array, " N"],
    change: Callable[[Array], Array],
) -> Float[Array, "L P K C S W"]:
    """Copy pages of one layer, with their keys [N, K, S, W] changed on the way.

    A page may be its own target; a target that is the trash page or -1 is padding.
    """
    pages = pool.at[layer, source].get(mode="clip")
    pages = pages.at[:, :, 0].set(change(pages[:, :, 0]))
    return pool.at[layer, _real_targets(pool, target)].set(pages, mode="drop")


def _copied(
    pool: Float[Array, "L P K C S W"], source: Int[Array, " N"], target: Int[Array, " N"]
) -> Float[Array, "L P K C S W"]:
    pages = pool.at[:, source].get(mode="clip")
    return pool.at[:, _real_targets(pool, target)].set(pages, mode="drop")


def _real_targets(pool: Float[Array, "L P K C S W"], target: Int[Array, " N"]) -> Int[Array, " N"]:
    """Return targets with padding moved beyond the pool, where writes are dropped."""
    return jnp.where(target > TRASH_PAGE, target, pool.shape[1])


def locate(
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    page_size: int,
    num_pages: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Return (page, offset in page) of each position.

    Negative positions, positions beyond the table and page ids outside the pool land in the trash
    page: never in a page that belongs to somebody.
    """
    index = positions // page_size
    pages = jnp.take_along_axis(block_table, jnp.maximum(index, 0), axis=1, mode="clip")
    fits = (positions >= 0) & (index < block_table.shape[1]) & (pages > 0) & (pages < num_pages)
    return jnp.where(fits, pages, TRASH_PAGE), jnp.where(fits, positions % page_size, 0)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    # Page ids are int32.
    return whole and 2 <= int(value) < 2**31


def _pool_shape(group: CacheGroup, num_pages: int, page_size: int) -> tuple[int, ...]:
    heads, planes = group.num_kv_heads, group.planes
    return (group.num_layers, num_pages, heads, planes, page_size, group.width)


def page_size_of(cache: KVCache) -> int:
    """Return S, the tokens per page."""
    return cache.groups[0].shape[4]


def num_pages_of(cache: KVCache) -> tuple[int, ...]:
    """Return P of every group."""
    return tuple(group.shape[1] for group in jax.tree.leaves(cache))
