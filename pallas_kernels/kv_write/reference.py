"""Writing token by token: what the others are compared with."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write.xla import as_stored


def kv_write(
    pool: Num[Array, "L P K C S W"],
    factors: Float[Array, "L P K 2 S"] | None,
    layer: Int[Array, ""],
    tokens: Float[Array, "B T K C W"],
    pages: Int[Array, "B T"],
    offsets: Int[Array, "B T"],
    *,
    value_dim: int,
    turned: bool,
) -> tuple[Num[Array, "L P K C S W"], Float[Array, "L P K 2 S"] | None]:
    """Write tokens in their order; see the package for the contract."""
    if not pool.size or not tokens.size:
        return pool, factors
    values, of_tokens = as_stored(tokens, pool, value_dim=value_dim, turned=turned)
    num_layers, num_pages, page_size = pool.shape[0], pool.shape[1], pool.shape[4]
    flat = values.reshape(-1, *values.shape[2:])
    flat_factors = None if of_tokens is None else of_tokens.reshape(-1, *of_tokens.shape[2:])
    pages, offsets = pages.reshape(-1), offsets.reshape(-1)

    def write(i: Array, pools: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        pool, factors = pools
        page, offset = pages[i], offsets[i]
        sizes = ((layer, num_layers), (page, num_pages), (offset, page_size))
        inside = jnp.all(jnp.array([(x >= 0) & (x < size) for x, size in sizes]))
        where = (layer.clip(0, num_layers - 1), page.clip(0, num_pages - 1))
        at = (*where, slice(None), slice(None), offset.clip(0, page_size - 1))
        pool = pool.at[at].set(jnp.where(inside, flat[i], pool[at]))
        if factors is not None and flat_factors is not None:
            factors = factors.at[at].set(jnp.where(inside, flat_factors[i], factors[at]))
        return pool, factors

    return lax.fori_loop(0, flat.shape[0], write, (pool, factors))
