"""Writing new keys and values into the pages of a pool, in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native
from pallas_kernels.kv_write import cpu, reference, xla
from pallas_kernels.paged_attention import codes
from pallas_kernels.sharded import is_sharded

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cpu": cpu.kv_write,
    "xla": xla.kv_write,
    "reference": reference.kv_write,
}


def kv_write(
    pool: Num[Array, "L P K C S W"],
    factors: Float[Array, "L P K 2 S"] | None,
    layer: int | Int[Array, ""],
    tokens: Float[Array, "B T K C W"],
    pages: Int[Array, "B T"],
    offsets: Int[Array, "B T"],
    *,
    value_dim: int,
    turned: bool = False,
    implementation: str = "auto",
) -> tuple[Num[Array, "L P K C S W"], Float[Array, "L P K 2 S"] | None]:
    """Return the pool, and its factors, with tokens at (page, offset) of one layer.

    Tokens are converted to the pool's dtype, or rounded to codes and factors as
    `paged_attention.codes` tells; `value_dim` columns of a latent have a factor of their own. With
    `turned`, keys are multiplied with a Hadamard matrix before they are rounded. A layer, page or
    offset outside the pool, negative ones included, is written nowhere. Of two tokens for one place
    the later one stays ("cpu", "reference"), or a mixture of both ("xla"). Nothing is copied where
    the pool is donated. XLA divides by multiplying: a number in the middle between two codes may
    get the other one.

    "auto" is "cpu" wherever the program is compiled for a CPU and the native library is there and
    knows the dtypes, and "xla" elsewhere, also for arrays on a mesh. Inside a `shard_map` that
    checks what varies over its mesh (`check_vma`) only "xla" can be traced.

    Raises: KeyError for an implementation that is not in the table; KernelUnavailable when "cpu" is
    asked for and cannot run; ValueError for operands that do not go together.
    """
    _check(pool, factors, tokens, value_dim, turned)
    write = functools.partial(
        _choose(implementation, pool, tokens), value_dim=value_dim, turned=turned
    )
    return write(pool, factors, jnp.asarray(layer, jnp.int32), tokens, pages, offsets)


def _check(pool: Array, factors: Array | None, tokens: Array, value_dim: int, turned: bool) -> None:
    coded = pool.dtype.name in codes.LARGEST
    if coded == (factors is None):
        raise ValueError(f"a pool of {pool.dtype.name} {'without' if coded else 'with'} factors")
    if factors is not None and factors.dtype != codes.FACTOR_DTYPE:
        raise ValueError(f"factors are {codes.FACTOR_DTYPE}, not {factors.dtype}")
    if turned and not (coded and pool.shape[3] == 2):
        raise ValueError("keys are turned where they become codes, and stand beside values")
    _, _, heads, planes, _, width = pool.shape
    if tokens.shape[2:] != (heads, planes, width):
        raise ValueError(f"tokens of {tokens.shape[2:]} in a pool of {(heads, planes, width)}")
    if not 1 <= value_dim <= width:
        raise ValueError(f"{value_dim} of {width} columns cannot be values")


def _choose(implementation: str, pool: Array, tokens: Array) -> Callable[..., Any]:
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation]
    on_a_mesh = any(is_sharded(x) for x in (pool, tokens))
    if on_a_mesh or not cpu.knows(pool, tokens) or not native.available():
        return xla.kv_write
    return _by_platform


def _by_platform(*arrays: Any, value_dim: int, turned: bool) -> Any:
    static = {"value_dim": value_dim, "turned": turned}
    return lax.platform_dependent(
        *arrays,
        cpu=functools.partial(cpu.kv_write, **static),
        default=functools.partial(xla.kv_write, **static),
    )


__all__ = ["IMPLEMENTATIONS", "kv_write"]
