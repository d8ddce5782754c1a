"""Weights whose products are watched: what statistics a calibration takes of their inputs.

A watched weight has a seat for statistics. The seat plays no part in the product; its cotangent is
the statistics of the rows that were multiplied. So `jax.grad` with respect to seats brings them out
of any forward pass, through `jit` and loops, and no layer knows of it. Nothing that the cotangent
does not need is computed: XLA drops the rest of the backward pass.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.pytree import pytree, static


@pytree
class InputStatistics:
    """Sums over rows x: of x^T x, of |x|, and of one; nothing here grows with their number.

    A stack of matrices, of experts or heads, has a stack of sums over each one's own rows.
    """

    gram: Float[Array, "*stack K K"]
    magnitude: Float[Array, "*stack K"]
    num_rows: Float[Array, "*stack"]


@pytree
class Watched:
    """An array that stands in `Params` for itself, with the axes of a `PackedLeaf`."""

    weight: Array
    seat: InputStatistics
    num_in_axes: int = static()
    num_batch_axes: int = static(default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.weight.shape


def no_statistics(shape: tuple[int, ...], num_in_axes: int, num_batch_axes: int) -> InputStatistics:
    """Return the sums over no rows, of the products with a weight of `shape`."""
    stack, rest = shape[:num_batch_axes], shape[num_batch_axes:]
    num_in = math.prod(rest[:num_in_axes])
    lead = (math.prod(stack),) if stack else ()
    return InputStatistics(
        gram=jnp.zeros((*lead, num_in, num_in), jnp.float32),
        magnitude=jnp.zeros((*lead, num_in), jnp.float32),
        num_rows=jnp.zeros(lead, jnp.float32),
    )


def watch(x: Float[Array, "..."], weight: Watched) -> Float[Array, "..."]:
    """Return x on its way to the product, noting its rows in the cotangent of the seat."""
    num_in = weight.seat.magnitude.shape[-1]
    if not weight.num_batch_axes:
        return _noted(x.reshape(-1, num_in), weight.seat).reshape(x.shape)
    num_stacked = weight.seat.magnitude.shape[0]
    tiles = jnp.swapaxes(x.reshape(-1, num_stacked, num_in), 0, 1)
    index = jnp.arange(num_stacked, dtype=jnp.int32)
    tiles = watch_tiles(tiles, weight, index, jnp.full_like(index, tiles.shape[1]))
    return jnp.swapaxes(tiles, 0, 1).reshape(x.shape)


def watch_tiles(
    tiles: Float[Array, "N R K"],
    weight: Watched,
    tile_group: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
) -> Float[Array, "N R K"]:
    """Do the same for tiles of rows, of which the first `tile_rows` are in use."""
    return _noted_tiles(tiles, weight.seat, tile_group, tile_rows)


def statistics_of(rows: Float[Array, "R K"]) -> InputStatistics:
    """Return the sums over rows, in float32."""
    x = rows.astype(jnp.float32)
    return InputStatistics(
        gram=jnp.dot(x.T, x, precision=lax.Precision.HIGHEST),
        magnitude=jnp.abs(x).sum(0),
        num_rows=jnp.float32(x.shape[0]),
    )


@jax.custom_vjp
def _noted(rows: Float[Array, "R K"], seat: InputStatistics) -> Float[Array, "R K"]:
    del seat
    return rows


_noted.defvjp(lambda rows, _: (rows, rows), lambda rows, back: (back, statistics_of(rows)))


@jax.custom_vjp
def _noted_tiles(
    tiles: Float[Array, "N R K"], seat: InputStatistics, tile_group: Array, tile_rows: Array
) -> Float[Array, "N R K"]:
    del seat, tile_group, tile_rows
    return tiles


def _tiles_forward(tiles: Array, seat: InputStatistics, tile_group: Array, tile_rows: Array):
    return tiles, (tiles, seat, tile_group, tile_rows)


def _tiles_backward(kept: tuple[Array, InputStatistics, Array, Array], back: Array):
    tiles, seat, tile_group, tile_rows = kept
    used = jnp.arange(tiles.shape[1], dtype=jnp.int32)[None] < tile_rows[:, None]

    def add(sums: InputStatistics, tile: tuple[Array, Array, Array]):
        rows, group, count = tile
        found = dataclasses.replace(statistics_of(rows), num_rows=count.astype(jnp.float32))
        return jax.tree.map(lambda old, new: old.at[group].add(new), sums, found), None

    tiles = jnp.where(used[:, :, None], tiles, 0.0)
    empty = jax.tree.map(jnp.zeros_like, seat)
    sums = lax.scan(add, empty, (tiles, tile_group, tile_rows))[0]
    nothing = np.zeros(tile_group.shape, jax.dtypes.float0)
    return back, sums, nothing, nothing


_noted_tiles.defvjp(_tiles_forward, _tiles_backward)
