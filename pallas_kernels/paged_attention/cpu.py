"""Paged attention for the CPU, in C++ behind XLA's foreign function interface.

A query's result depends on the query and what it sees, bit for bit, and on nothing else; the
comment of `cpu_problem.h` tells how.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import native
from pallas_kernels.paged_attention import codes, transforms
from pallas_kernels.unavailable import KernelUnavailable

POOL_DTYPES = ("float32", "bfloat16", "float16", *codes.LARGEST)
# Positions are int32: no window is a window that none exceeds.
NO_WINDOW = 1 << 32


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
    turned: bool = False,
    variant: int = -1,
    threads: int = 0,
    lse: bool = False,
) -> Float[Array, "B T K G Hv"]:
    """Attend in C++; see the package for the contract.

    `variant` forces an instruction set, by its index in `native/cpu_features.h`; `threads`
    plans and runs for so many threads (0: all there are). Neither changes what a variant computes.
    Derivatives are those of the XLA implementation.

    Raises: KernelUnavailable without the native library, for a pool of another dtype, or for `lse`.
    """
    if lse:
        raise KernelUnavailable("the CPU kernel does not return logarithms of sums of weights")
    native.target("PkPagedAttention")
    if pool.dtype.name not in POOL_DTYPES:
        raise KernelUnavailable(
            f"the CPU kernel reads pages of {', '.join(POOL_DTYPES)}, not {pool.dtype.name}"
        )
    attend = _attention(
        float(scale),
        value_dim,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else float(softcap),
        turned,
        variant,
        threads,
    )
    arrays = transforms.operands(q, pool, layer, block_table, positions, lengths, sinks, factors)
    wide = q if q.dtype == jnp.bfloat16 else q.astype(jnp.float32)
    return attend(wide, *arrays[1:]).astype(q.dtype)


@functools.lru_cache(maxsize=256)
def _attention(
    scale: float,
    value_dim: int,
    window: int,
    softcap: float,
    turned: bool,
    variant: int,
    threads: int,
) -> Callable[..., Array]:
    """Return attention over arrays: q, pool, factors, layers, table, positions, lengths, sinks."""

    def call(q: Array, *others: Array) -> Array:
        result = jax.ShapeDtypeStruct((*q.shape[:4], value_dim), q.dtype)
        return jax.ffi.ffi_call(native.target("PkPagedAttention"), result)(
            q,
            *others,
            scale=np.float32(scale),
            window=np.int64(window),
            softcap=np.float32(softcap),
            turned=turned,
            variant=np.int64(variant),
            threads=np.int64(threads),
        )

    return transforms.transformable(
        call,
        scale=scale,
        value_dim=value_dim,
        window=None if window == NO_WINDOW else window,
        softcap=softcap or None,
        turned=turned,
    )
