"""Paged attention for the CPU, in C++ behind XLA's foreign function interface.

A query's result depends on the query and what it sees, bit for bit, and on nothing else; the
comment of `cpu_problem.h` tells how.
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
from pallas_kernels.paged_attention import codes, xla
from pallas_kernels.unavailable import KernelUnavailable

POOL_DTYPES = ("float32", "bfloat16", "float16", *codes.LARGEST)
# Positions are int32: no window is a window that none exceeds.
NO_WINDOW = 1 << 32

# A call without factors or sinks passes empty arrays of the same rank.
NO_FACTORS = (0, 0, 0, 0, 0)


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
    variant: int = -1,
    threads: int = 0,
) -> Float[Array, "B T K G Hv"]:
    """Attend in C++; see the package for the contract.

    `variant` forces an instruction set, by its index in `native/cpu_features.h`; `threads`
    plans and runs for so many threads (0: all there are). Neither changes what a variant computes.
    Derivatives are those of the XLA implementation.

    Raises: KernelUnavailable without the native library, or for a pool of another dtype.
    """
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
        variant,
        threads,
    )
    out = attend(
        q if q.dtype == jnp.bfloat16 else q.astype(jnp.float32),
        pool,
        jnp.zeros(NO_FACTORS, codes.FACTOR_DTYPE) if factors is None else factors,
        jnp.broadcast_to(jnp.asarray(layer, jnp.int32), lengths.shape),
        block_table.astype(jnp.int32),
        positions.astype(jnp.int32),
        lengths.astype(jnp.int32),
        _sink_rows(sinks, q.shape),
    )
    return out.astype(q.dtype)


def _sink_rows(
    sinks: Float[Array, "K G"] | None, q_shape: tuple[int, ...]
) -> Float[Array, "R K G"]:
    if sinks is None:
        return jnp.zeros((0, *q_shape[2:4]), jnp.float32)
    return sinks.astype(jnp.float32)[None]


@functools.lru_cache(maxsize=256)
def _attention(
    scale: float, value_dim: int, window: int, softcap: float, variant: int, threads: int
) -> Callable[..., Array]:
    """Return attention over arrays: q, pool, factors, layers, table, positions, lengths, sinks."""

    @custom_batching.custom_vmap
    def call(q: Array, *others: Array) -> Array:
        result = jax.ShapeDtypeStruct((*q.shape[:4], value_dim), q.dtype)
        return jax.ffi.ffi_call(native.target("PkPagedAttention"), result)(
            q,
            *others,
            scale=np.float32(scale),
            window=np.int64(window),
            softcap=np.float32(softcap),
            variant=np.int64(variant),
            threads=np.int64(threads),
        )

    @call.def_vmap
    def _(axis_size: int, in_batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        out = call(*_fold(axis_size, in_batched, operands))
        return out.reshape(axis_size, -1, *out.shape[1:]), True

    attend = jax.custom_jvp(call)
    attend.defjvp(functools.partial(_jvp, attend, scale, value_dim, window, softcap))
    return attend


def _fold(size: int, mapped: list[bool], operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Make a mapped axis part of the batch, and that of mapped pools part of their layers."""
    q, pool, factors, layers, table, positions, lengths, sinks = operands
    batch = q.shape[int(mapped[0])]
    rows = functools.partial(_spread, size)
    layers = rows(layers, mapped[3])
    if mapped[1] or mapped[2]:
        num_layers = pool.shape[int(mapped[1])]
        # A number out of range means what it means in a pool that is not mapped.
        layers = jnp.clip(jnp.where(layers < 0, layers + num_layers, layers), 0, num_layers - 1)
        layers += num_layers * jnp.arange(size, dtype=jnp.int32)[:, None]
        pool = _join(rows(pool, mapped[1]))
        factors = _join(rows(factors, mapped[2])) if factors.size else factors.reshape(NO_FACTORS)
    if mapped[7] or sinks.shape[0] > 1:
        sinks = rows(sinks, mapped[7])
        sinks = _join(
            jnp.broadcast_to(sinks, (size, batch if sinks.shape[1] else 0, *sinks.shape[2:]))
        )
    others = zip((table, positions, lengths), mapped[4:7], strict=True)
    folded = [_join(rows(x, is_mapped)) for x, is_mapped in others]
    return (_join(rows(q, mapped[0])), pool, factors, _join(layers), *folded, sinks)


def _spread(size: int, x: Array, is_mapped: bool) -> Array:
    return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))


def _join(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _jvp(
    attend: Callable[..., Array],
    scale: float,
    value_dim: int,
    window: int,
    softcap: float,
    primals: tuple[Array, ...],
    tangents: tuple[Any, ...],
) -> tuple[Array, Array]:
    """Take derivatives of the XLA implementation, which computes the same function."""
    q, pool, factors, layers, table, positions, lengths, sinks = primals

    def smooth(q: Array, pool: Array, factors: Array, sinks: Array) -> Array:
        return xla.paged_attention(
            q,
            pool,
            layers[0],
            table,
            positions,
            lengths,
            scale=scale,
            value_dim=value_dim,
            window=None if window == NO_WINDOW else window,
            softcap=softcap or None,
            sinks=sinks[0] if sinks.shape[0] else None,
            factors=factors if factors.size else None,
        )

    moving = (*tangents[:3], tangents[7])
    _, tangent = jax.jvp(smooth, (q, pool, factors, sinks), moving)
    return attend(*primals), tangent
