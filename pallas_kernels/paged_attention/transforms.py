"""`vmap` and derivatives for attention in a foreign language, which has neither of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import codes, xla
from pallas_kernels.paged_attention.hadamard import with_turned_queries

# A call without factors or sinks passes empty arrays of the same rank.
NO_FACTORS = (0, 0, 0, 0, 0)

# Attention over arrays: q, pool, factors, layers [B], table, positions, lengths, sinks [R, K, G]
# with R of 0 (no sinks), 1 (the same for all rows) or B.
# Returns attention, or attention and the logarithms of sums of weights.
type Attention = Callable[..., Any]


def transformable(
    run: Attention,
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    turned: bool = False,
    lse: bool = False,
) -> Attention:
    """Give an implementation its `vmap`, by folding into the batch, and XLA's derivatives.

    `turned` tells that it turns queries by itself, `lse` that it returns two arrays.
    """

    @custom_batching.custom_vmap
    def call(*operands: Array) -> Any:
        return run(*operands)

    @call.def_vmap
    def _(axis_size: int, in_batched: list[bool], *operands: Array) -> tuple[Any, Any]:
        found = call(*_fold(axis_size, in_batched, operands))
        apart = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), found)
        return apart, jax.tree.map(lambda _: True, apart)

    attend = jax.custom_jvp(call)
    static = {"scale": scale, "value_dim": value_dim, "window": window, "softcap": softcap}
    static |= {"lse": True} if lse else {}
    attend.defjvp(functools.partial(_jvp, attend, static, turned))
    return attend


def operands(
    q: Float[Array, "B T K G W"],
    pool: Array,
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sinks: Float[Array, "K G"] | None,
    factors: Float[Array, "L P K 2 S"] | None,
) -> tuple[Array, ...]:
    """Return the op's arrays as an `Attention` takes them."""
    return (
        q,
        pool,
        jnp.zeros(NO_FACTORS, codes.FACTOR_DTYPE) if factors is None else factors,
        jnp.broadcast_to(jnp.asarray(layer, jnp.int32), lengths.shape),
        block_table.astype(jnp.int32),
        positions.astype(jnp.int32),
        lengths.astype(jnp.int32),
        jnp.zeros((0, *q.shape[2:4]), jnp.float32)
        if sinks is None
        else sinks.astype(jnp.float32)[None],
    )


def _fold(size: int, mapped: list[bool], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Make a mapped axis part of the batch, and that of mapped pools part of their layers."""
    q, pool, factors, layers, table, positions, lengths, sinks = arrays
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
    attend: Attention,
    static: dict[str, Any],
    turned: bool,
    primals: tuple[Array, ...],
    tangents: tuple[Any, ...],
) -> tuple[Any, Any]:
    """Take derivatives of the XLA implementation, which computes the same function."""
    q, pool, factors, layers, table, positions, lengths, sinks = primals
    run = with_turned_queries(xla.paged_attention) if turned else xla.paged_attention

    def smooth(q: Array, pool: Array, factors: Array, sinks: Array) -> Any:
        return run(
            q,
            pool,
            layers[0],
            table,
            positions,
            lengths,
            sinks=sinks[0] if sinks.shape[0] else None,
            factors=factors if factors.size else None,
            **static,
        )

    moving = (*tangents[:3], tangents[7])
    _, tangent = jax.jvp(smooth, (q, pool, factors, sinks), moving)
    return attend(*primals), tangent
