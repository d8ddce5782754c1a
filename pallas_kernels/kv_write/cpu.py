"""Writing on the CPU by the native library: one call turns, rounds and stores, where XLA needs ten.

A small call costs XLA a microsecond on the CPU, and a step of a small model is made of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native
from pallas_kernels.kv_write import xla
from pallas_kernels.paged_attention import codes
from pallas_kernels.paged_attention.transforms import NO_FACTORS
from pallas_kernels.unavailable import KernelUnavailable

type Pools = tuple[Array, Array]


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
    variant: int = -1,
    threads: int = 0,
) -> tuple[Num[Array, "L P K C S W"], Float[Array, "L P K 2 S"] | None]:
    """Write tokens in C++; see the package for the contract.

    `variant` forces an instruction set, by its index in `native/cpu_features.h`, `threads` a number
    of threads (0: all there are). Derivatives are those of the XLA implementation.

    Raises: KernelUnavailable without the native library, or for dtypes that it does not convert.
    """
    native.target("PkKvWrite")
    if not knows(pool, tokens):
        raise KernelUnavailable(
            f"the CPU kernel does not write {tokens.dtype.name} to pages of {pool.dtype.name}"
        )
    write = _writer(value_dim, turned, variant, threads)
    held = jnp.zeros(NO_FACTORS, codes.FACTOR_DTYPE) if factors is None else factors
    layers = jnp.broadcast_to(layer, tokens.shape[:1])
    places = (_words(x) for x in (layers, pages, offsets))
    pool, held = write(pool, held, tokens, *places)
    return pool, None if factors is None else held


def _words(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return ids in 32 bits; one that has more is outside, and stays so."""
    if ids.dtype.itemsize > 4:
        ids = ids.clip(-1, np.iinfo(np.int32).max)
    return ids.astype(jnp.int32)


def knows(pool: Array, tokens: Array) -> bool:
    """Return whether the kernel converts the tokens' dtype to the pool's."""
    given, held = tokens.dtype.name, pool.dtype.name
    if held in codes.LARGEST:
        return given in ("float32", "bfloat16")
    if given == "float32" and held == "bfloat16":
        return True
    return given == held and held in ("float32", "bfloat16", "float16")


@functools.lru_cache(maxsize=64)
def _writer(value_dim: int, turned: bool, variant: int, threads: int) -> Callable[..., Pools]:
    """Return writing over arrays: pool, factors, tokens, layers [B], pages, offsets."""

    @custom_batching.custom_vmap
    def call(pool: Array, factors: Array, *others: Array) -> Pools:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool, factors)]
        written = jax.ffi.ffi_call(
            native.target("PkKvWrite"), results, input_output_aliases={0: 0, 1: 1}
        )(
            pool,
            factors,
            *others,
            value_dim=np.int64(value_dim),
            turned=turned,
            variant=np.int64(variant),
            threads=np.int64(threads),
        )
        return written[0], written[1]

    @call.def_vmap
    def _(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Pools, Any]:
        pool, factors = call(*_fold(axis_size, in_batched, arrays))
        split = lambda x: x.reshape(axis_size, -1, *x.shape[1:])  # noqa: E731
        if not factors.size:
            factors = jnp.broadcast_to(factors, (axis_size, *NO_FACTORS))
            return (split(pool), factors), (True, True)
        return (split(pool), split(factors)), (True, True)

    write = jax.custom_jvp(call)
    write.defjvp(functools.partial(_jvp, write, {"value_dim": value_dim, "turned": turned}))
    return write


def _fold(size: int, mapped: list[bool], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Make a mapped axis part of the layers of pools, and of the batch of all else."""

    def joined(x: Array, is_mapped: bool) -> Array:
        whole = x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    pool, factors, *others = arrays
    tokens, layers, pages, offsets = map(joined, others, mapped[2:])
    num_layers = pool.shape[int(mapped[0])]
    instance = jnp.repeat(jnp.arange(size, dtype=jnp.int32), layers.shape[0] // size)
    inside = (layers >= 0) & (layers < num_layers)
    layers = jnp.where(inside, layers + num_layers * instance, -1)
    factors = joined(factors, mapped[1]) if factors.size else factors.reshape(NO_FACTORS)
    return joined(pool, mapped[0]), factors, tokens, layers, pages, offsets


def _jvp(
    write: Callable[..., Pools],
    static: dict[str, Any],
    primals: tuple[Array, ...],
    tangents: tuple[Any, ...],
) -> tuple[Pools, Any]:
    """Take derivatives of the XLA implementation, which computes the same function."""
    pool, factors, tokens, layers, pages, offsets = primals

    def smooth(pool: Array, factors: Array, tokens: Array) -> Pools:
        held = factors if factors.size else None
        pool, held = xla.kv_write(pool, held, layers[0], tokens, pages, offsets, **static)
        return pool, factors if held is None else held

    _, tangent = jax.jvp(smooth, (pool, factors, tokens), tangents[:3])
    return write(*primals), tangent
