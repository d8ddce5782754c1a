"""The KV cache on the device: one pool of pages per cache group.

Only this file and the kernels know a pool's layout, `[L, P, K, C, S, W]`: layer, page, key/value
head, plane (keys, values), token in page, width. One page of one head is contiguous, which is what
a kernel copies at once. Page 0 is trash: padding rows write there, nobody reads it, and no sequence
ever owns it.

A pool in eight bits has codes for values, and factors `[L, P, K, 2, S]` for every token and head:
`pallas_kernels.paged_attention.codes` tells what they mean. Tokens are rounded as they are written,
each by itself, and read from the pool by their own step too: how a prompt is cut changes nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from inferjax.config import KV_DTYPES, CacheGroup, Exec, ModelConfig, cache_groups
from inferjax.errors import OutOfPages, UnsupportedConfig
from inferjax.pytree import pytree
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.xla import as_stored
from pallas_kernels.paged_attention import codes

TRASH_PAGE = 0

# What holds the codes of a dtype in eight bits.
CODES = {"int8": "int8", "float8_e4m3fn": "uint8"}


@pytree
class Pages:
    """The pool of one group: keys and values, or their codes and factors."""

    values: Num[Array, "L P K C S W"]
    factors: Float[Array, "L P K 2 S"] | None = None


@pytree
class KVCache:
    """All pages of all groups; donate it to every step and use only what the step returns."""

    groups: tuple[Pages, ...]


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
            why="keys and values are not stored so",
            fix=f"use one of {', '.join(KV_DTYPES)}",
        )
    try:
        return KVCache(groups=tuple(_zeros(shape, kind) for shape in shapes))
    except jax.errors.JaxRuntimeError as error:
        wanted = sum(_num_bytes(shape, kind) for shape in shapes)
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
    """Return the shape of every pool's values."""
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
    return sum(group_bytes(group, 1, dtype) for group in cache_groups(config))


def group_bytes(group: CacheGroup, num_tokens: int, dtype: str) -> int:
    """Return the bytes that tokens take in the pool of a group."""
    return _num_bytes(_pool_shape(group, 1, num_tokens), dtype)


def dtype_of(cache: KVCache) -> str:
    """Return the `kv_dtype` of a cache."""
    held = cache.groups[0].values.dtype.name
    return next((kind for kind, stored in CODES.items() if stored == held), held)


def is_stored(pool: Pages) -> bool:
    """Return whether a pool has a dtype that there is, and factors exactly where it needs them."""
    held = pool.values.dtype.name
    if held not in CODES.values():
        return held in KV_DTYPES and pool.factors is None
    shape = _factors_shape(pool.values.shape)
    return pool.factors is not None and pool.factors.shape == shape


def is_turned(pool: Pages) -> bool:
    """Return whether keys are turned before they are written, to lose less when they are rounded.

    A latent is not: it is value and key at once. Nor is float8, whose steps are as fine as a number
    is small: turned, small columns get the coarse steps of large ones.
    """
    return pool.values.dtype == jnp.int8 and pool.values.shape[3] == 2


def write(
    pool: Pages,
    layer: int | Int[Array, ""],
    new: Float[Array, "B T K C W"],
    pages: Int[Array, "B T"],
    offsets: Int[Array, "B T"],
    *,
    value_dim: int,
    implementation: str = "auto",
) -> Pages:
    """Store new tokens in place; a page id outside the pool is dropped, never clamped.

    `value_dim` tells the value columns of a latent, which have a factor of their own.
    """
    values, factors = kv_write(
        pool.values,
        pool.factors,
        layer,
        new,
        pages,
        offsets,
        value_dim=value_dim,
        turned=is_turned(pool),
        implementation=implementation,
    )
    return Pages(values=values, factors=factors)


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
    pool: Pages,
    layer: int,
    source: Int[Array, " N"],
    target: Int[Array, " N"],
    change: Callable[[Array], Array],
    *,
    value_dim: int,
) -> Pages:
    """Copy pages of one layer, with their keys [N, K, S, W] changed on the way.

    A page may be its own target; a target that is the trash page or -1 is padding. Keys in eight
    bits are rounded once more; what does not change keeps its codes.
    """
    pages = jax.tree.map(lambda x: x.at[layer, source].get(mode="clip"), pool)
    if pages.factors is None:
        values = pages.values.at[:, :, 0].set(change(pages.values[:, :, 0]))
        pages = Pages(values=values)
    else:
        by_token = jax.tree.map(lambda x: x.swapaxes(2, 3), pages)
        tokens = codes.decode(by_token.values, by_token.factors, value_dim=value_dim)
        tokens = tokens.at[:, :, :, 0].set(change(tokens[:, :, :, 0]))
        values, factors = as_stored(tokens, pool.values, value_dim=value_dim, turned=False)
        rounded = Pages(values=values, factors=factors)
        pages = jax.tree.map(lambda x: x.swapaxes(2, 3), rounded)
    into = _real_targets(pool, target)
    return jax.tree.map(lambda x, new: x.at[layer, into].set(new, mode="drop"), pool, pages)


def _copied(pool: Pages, source: Int[Array, " N"], target: Int[Array, " N"]) -> Pages:
    into = _real_targets(pool, target)
    return jax.tree.map(
        lambda x: x.at[:, into].set(x.at[:, source].get(mode="clip"), mode="drop"), pool
    )


def _real_targets(pool: Pages, target: Int[Array, " N"]) -> Int[Array, " N"]:
    """Return targets with padding moved beyond the pool, where writes are dropped."""
    return jnp.where(target > TRASH_PAGE, target, pool.values.shape[1])


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


def _factors_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:3], codes.NUM_FACTORS, shape[4])


def _zeros(shape: tuple[int, ...], dtype: str) -> Pages:
    if dtype not in CODES:
        return Pages(values=jnp.zeros(shape, dtype))
    factors = jnp.zeros(_factors_shape(shape), codes.FACTOR_DTYPE)
    return Pages(values=jnp.zeros(shape, CODES[dtype]), factors=factors)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    values = math.prod(shape) * jnp.dtype(CODES.get(dtype, dtype)).itemsize
    if dtype not in CODES:
        return values
    return values + math.prod(_factors_shape(shape)) * jnp.dtype(codes.FACTOR_DTYPE).itemsize


def page_size_of(cache: KVCache) -> int:
    """Return S, the tokens per page."""
    return cache.groups[0].values.shape[4]


def num_pages_of(cache: KVCache) -> tuple[int, ...]:
    """Return P of every group."""
    return tuple(group.values.shape[1] for group in cache.groups)
