"""Writing as scatters, which XLA runs in place."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention import codes
from pallas_kernels.paged_attention.hadamard import spread


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
    """Write tokens; see the package for the contract."""
    values, of_tokens = as_stored(tokens, pool, value_dim=value_dim, turned=turned)
    num_pages, page_size = pool.shape[1], pool.shape[4]
    # In a scatter, negative numbers count from the end; beyond it nothing is written.
    inside = (layer >= 0) & (pages >= 0) & (offsets >= 0) & (offsets < page_size)
    pages = jnp.where(inside, pages, num_pages)
    place = (jnp.full_like(pages, layer), pages, slice(None), slice(None), offsets)
    pool = pool.at[place].set(values, mode="drop")
    if factors is not None:
        factors = factors.at[place].set(of_tokens, mode="drop")
    return pool, factors


def as_stored(
    tokens: Float[Array, "*tokens C W"], pool: Array, *, value_dim: int, turned: bool
) -> tuple[Num[Array, "*tokens C W"], Float[Array, "*tokens 2"] | None]:
    """Return tokens in the dtype of the pool, and their factors where they become codes."""
    if pool.dtype.name not in codes.LARGEST:
        return tokens.astype(pool.dtype), None
    if turned:
        tokens = tokens.astype(jnp.float32)
        tokens = tokens.at[..., 0, :].set(spread(tokens[..., 0, :]))
    return codes.encode(tokens, pool.dtype.name, value_dim=value_dim)
