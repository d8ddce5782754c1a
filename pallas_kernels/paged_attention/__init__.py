"""Attention of ragged new tokens over a paged cache: decode, prefill and verification alike."""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native
from pallas_kernels.paged_attention import codes, cpu, gpu, reference, xla
from pallas_kernels.paged_attention.hadamard import spread, with_turned_queries
from pallas_kernels.sharded import is_sharded

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cpu": cpu.paged_attention,
    "gpu": gpu.paged_attention,
    "xla": xla.paged_attention,
    "reference": reference.paged_attention,
}


@overload
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
    factors: Float[Array, "L P K 2 S"] | None = None,
    turned: bool = False,
    implementation: str = "auto",
    lse: Literal[False] = False,
) -> Float[Array, "B T K G Hv"]: ...


@overload
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
    factors: Float[Array, "L P K 2 S"] | None = None,
    turned: bool = False,
    implementation: str = "auto",
    lse: Literal[True],
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G"]]: ...


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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
    factors: Float[Array, "L P K 2 S"] | None = None,
    turned: bool = False,
    implementation: str = "auto",
    lse: bool = False,
) -> Any:
    """Attend from T >= 1 query tokens per row to the row's pages.

    A query at position p sees cached positions j with j <= p, j < lengths[b] and, with a window,
    p - j < window. Queries with a negative position are padding and return zeros. Keys are plane 0
    of the pool, values the first `value_dim` columns of its last plane (a latent pool has one plane
    that is both). Whatever lies where no query of the row sees it, NaN included, has no influence:
    beyond the row's length, and in pages that its window has left.
    A pool of codes, int8 or uint8, has `factors` beside it: `codes` tells what they stand for. If
    keys were `turned` before they were written (`hadamard`), queries are turned here.
    `sinks` are one extra logit per head without a value. Scores and sums are float32; the result
    has q's dtype. With `lse`, the natural logarithm of every query's sum of weights, in float32,
    comes second: of exp(score) over the keys that it sees, after `softcap`, and of its sink, if
    there are sinks. It is -inf for a query, or padding, that sees nothing and has no sink. Parts of
    one attention are joined by `combine`, which takes the sinks; then no part may have them.

    "auto" is "cpu" wherever the program is compiled for a CPU and the native library is there,
    "gpu" where it is compiled for an NVIDIA GPU that the kernel knows, and "xla" elsewhere, also
    for arrays on a mesh: XLA would gather a sharded pool for a foreign call.

    Raises: KeyError for an implementation that is not in the table; KernelUnavailable when "cpu" or
    "gpu" is asked for and cannot run ("cpu" has no `lse`); ValueError for codes without factors, or
    the reverse.
    """
    if (factors is None) == (pool.dtype.name in codes.LARGEST):
        raise ValueError(
            f"a pool of {pool.dtype.name} {'without' if factors is None else 'with'} factors"
        )
    run = _choose(implementation, q, pool, value_dim, turned, lse)
    return run(
        q,
        pool,
        jnp.asarray(layer, jnp.int32),
        block_table,
        positions,
        lengths,
        scale=scale,
        value_dim=value_dim,
        window=window,
        softcap=softcap,
        sinks=sinks,
        factors=factors,
    )


def _choose(
    implementation: str, q: Array, pool: Array, value_dim: int, turned: bool, lse: bool
) -> Callable[..., Any]:
    named = functools.partial(_named, turned=turned, lse=lse)
    if implementation != "auto":
        return named(implementation)
    kernels = {}
    if not (is_sharded(q) or is_sharded(pool)):
        if pool.dtype.name in cpu.POOL_DTYPES and native.available() and not lse:
            kernels["cpu"] = named("cpu")
        if gpu.unavailable(q, pool, value_dim) is None:
            kernels["cuda"] = named("gpu")
    default = named("xla")
    return functools.partial(_by_platform, kernels, default) if kernels else default


def _named(implementation: str, turned: bool, lse: bool) -> Callable[..., Any]:
    """Return an implementation of the table that turns queries, or for which they are turned."""
    run = IMPLEMENTATIONS[implementation]
    if lse:
        run = functools.partial(run, lse=True)
    if not turned:
        return run
    if implementation == "cpu":
        return functools.partial(run, turned=True)
    if implementation == "gpu":  # which multiplies queries of 16 bits only
        return lambda q, *arrays, **static: run(spread(q), *arrays, **static)
    return with_turned_queries(run)


def _by_platform(
    kernels: dict[str, Callable[..., Any]],
    default: Callable[..., Any],
    *arrays: Array,
    sinks: Array | None,
    factors: Array | None,
    **static: Any,
) -> Any:
    def bound(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sinks, factors, *arrays: run(*arrays, sinks=sinks, factors=factors, **static)

    branches = {platform: bound(run) for platform, run in kernels.items()}
    return lax.platform_dependent(sinks, factors, *arrays, default=bound(default), **branches)
