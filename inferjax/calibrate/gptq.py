"""GPTQ: rows are rounded one after the other, and later rows make up for each one's error."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.calibrate.grids import DAMPING, damped, searched_grid
from inferjax.quant.schemes import (
    Grid,
    Scheme,
    decode,
    encode,
    grid_of,
    group_rows,
    store,
)
from inferjax.quant.watched import InputStatistics
from pallas_kernels.quant_matmul import PackedWeight

# Rows between two updates of all later rows, where groups do not say so.
BLOCK = 128


@functools.partial(jax.jit, static_argnames=("scheme", "act_order", "damping"))
def pack(
    matrix: Float[Array, "K N"],
    statistics: InputStatistics,
    scheme: Scheme,
    *,
    act_order: bool = True,
    damping: float = DAMPING,
) -> PackedWeight:
    """Round a matrix so that its product with the inputs seen changes little.

    A group's grid is chosen when its first row's turn comes, from rows that hold the corrections so
    far. `act_order` takes rows with large inputs first; groups must stay neighbours in the packed
    matrix, so all grids are then chosen beforehand.

    Source: GPTQ, arXiv 2210.17323, algorithm 1; static groups as in its authors' code.
    """
    num_in = matrix.shape[0]
    size = scheme.group or BLOCK
    missing = -num_in % size
    rows = jnp.pad(matrix.astype(jnp.float32), ((0, missing), (0, 0)), mode="edge")
    gram = damped(jnp.pad(statistics.gram, (0, missing)), damping)
    importance = jnp.diagonal(gram)[:num_in]
    order = jnp.arange(rows.shape[0], dtype=jnp.int32)
    if act_order:
        order = jnp.argsort(-jnp.diagonal(gram)).astype(jnp.int32)
        gram = gram[order][:, order]
    fixed = None
    if act_order or not scheme.group:
        grouped = group_rows(rows if scheme.group else rows[:num_in], scheme)
        fixed = _grid(grouped, importance, scheme)
    codes, grid = _round_rows(rows[order], _factor(gram), order, fixed, scheme, size)
    codes = jnp.zeros_like(codes).at[order].set(codes)[:num_in]
    return store(codes, grid, scheme)


def _grid(grouped: Float[Array, "G R N"], importance: Float[Array, " K"], scheme: Scheme) -> Grid:
    """Choose grids by squared errors, weighed by the squares of their rows' inputs."""
    num_groups, size, _ = grouped.shape
    padded = jnp.pad(importance, (0, num_groups * size - importance.shape[0]))
    weights = padded.reshape(num_groups, size, 1)
    return searched_grid(grouped, lambda errors: (errors * errors * weights).sum(1), scheme)


def _factor(gram: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """Return the upper U with U^T U the inverse.

    Turned back to front, the lower Cholesky factor becomes an upper R with R R^T the matrix itself;
    U is its inverse. The inverse matrix, whose factor GPTQ's authors take, is never formed.
    """
    upper = jnp.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1]
    eye = jnp.eye(gram.shape[0], dtype=gram.dtype)
    return lax.linalg.triangular_solve(upper, eye, left_side=True, lower=False)


def _round_rows(
    rows: Float[Array, "K N"],
    factor: Float[Array, "K K"],
    order: Int[Array, " K"],
    fixed: Grid | None,
    scheme: Scheme,
    size: int,
) -> tuple[Array, Grid]:
    """Round rows in order, `size` of them before their errors reach all later ones.

    Without grids that are fixed beforehand, a block is a group and gets its grid when its turn
    comes.
    """
    num_rows, num_out = rows.shape
    codes = encode(rows[:1] * 0, Grid(jnp.ones((1, 1)), None), scheme)[0]
    codes = jnp.zeros((num_rows, num_out), codes.dtype)
    later = jnp.arange(num_rows, dtype=jnp.int32)

    def block(b: Array, state: tuple[Array, Array, Grid]) -> tuple[Array, Array, Grid]:
        rows, codes, grids = state
        start = b * size
        part = lax.dynamic_slice_in_dim(rows, start, size)
        links = lax.dynamic_slice_in_dim(factor, start, size)
        if fixed is None:
            grid = jax.tree.map(lambda g: g[0], grid_of(part[None], scheme))
            own = jax.tree.map(lambda g: jnp.broadcast_to(g, (size, num_out)), grid)
            grids = jax.tree.map(lambda old, g: old.at[b].set(g), grids, grid)
        else:
            groups = lax.dynamic_slice_in_dim(order, start, size) // (scheme.group or num_rows)
            own = jax.tree.map(lambda g: g[groups], fixed)
        within = lax.dynamic_slice_in_dim(links, start, size, axis=1)
        part, errors = _round_block(part, within, own, scheme)
        codes = lax.dynamic_update_slice_in_dim(codes, part, start, 0)
        links = jnp.where(later[None] >= start + size, links, 0.0)
        rows = rows - jnp.dot(links.T, errors, precision=lax.Precision.HIGHEST)
        return rows, codes, grids

    grids = fixed
    if fixed is None:
        empty = jnp.zeros((num_rows // size, num_out), jnp.float32)
        grids = Grid(empty, empty if scheme.minimum else None)
    _, codes, grids = lax.fori_loop(0, num_rows // size, block, (rows, codes, grids))
    return codes, grids


def _round_block(
    rows: Float[Array, "R N"], factor: Float[Array, "R R"], grid: Grid, scheme: Scheme
) -> tuple[Array, Float[Array, "R N"]]:
    """Round a block's rows, each of which corrects those below it; return codes and errors."""
    below = jnp.arange(rows.shape[0], dtype=jnp.int32)

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, errors = state
        own = jax.tree.map(lambda g: g[i], grid)
        rounded = decode(encode(rows[i], own, scheme)[0], own)
        error = (rows[i] - rounded) / factor[i, i]
        links = jnp.where(below > i, factor[i], 0.0)
        return rows - links[:, None] * error[None], errors.at[i].set(error)

    rows, errors = lax.fori_loop(0, rows.shape[0], step, (rows, jnp.zeros_like(rows)))
    return encode(rows, grid, scheme)[0], errors
