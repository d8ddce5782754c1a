"""The search for the grid of a group that loses least: clipping a few values makes a finer step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from inferjax.quant.schemes import Grid, Scheme, decode, encode, grid_of, per_row

# Shares of a group's range that are tried, the whole first.
NUM_SHRINKS, SMALLEST_SHRINK = 21, 0.5

# What is added to the diagonal of inputs' products, as a share of its mean.
DAMPING = 0.01

Loss = Callable[[Float[Array, "G R N"]], Float[Array, "G N"]]


def searched_grid(grouped: Float[Array, "G R N"], loss: Loss, scheme: Scheme) -> Grid:
    """Return each group's grid with the least loss, which is a function of the rounding errors."""

    def step(best: tuple[Array, Grid], shrink: Array) -> tuple[tuple[Array, Grid], None]:
        grid = grid_of(grouped, scheme, shrink)
        found = loss(rounding_errors(grouped, grid, scheme))
        better = found < best[0]
        chosen = jax.tree.map(lambda new, old: jnp.where(better, new, old), grid, best[1])
        return (jnp.where(better, found, best[0]), chosen), None

    whole = grid_of(grouped, scheme)
    shrinks = jnp.linspace(1.0, SMALLEST_SHRINK, NUM_SHRINKS, dtype=jnp.float32)
    first = (loss(rounding_errors(grouped, whole, scheme)), whole)
    return lax.scan(step, first, shrinks[1:])[0][1]


def rounding_errors(
    grouped: Float[Array, "*stack G R N"], grid: Grid, scheme: Scheme
) -> Float[Array, "*stack G R N"]:
    """Return by how much the nearest values of the grids miss."""
    return decode(encode(grouped, per_row(grid), scheme)[0], per_row(grid)) - grouped


def diagonal_blocks(gram: Float[Array, "K K"], size: int) -> Float[Array, "G R R"]:
    """Return the products of inputs within each group of `size`; missing rows have none."""
    missing = -gram.shape[0] % size
    padded = jnp.pad(gram, ((0, missing), (0, missing)))
    starts = jnp.arange(padded.shape[0] // size, dtype=jnp.int32) * size
    rows = padded.reshape(-1, size, padded.shape[1])
    columns = starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.take_along_axis(rows, columns[:, None, :], axis=2)


def damped(gram: Float[Array, "K K"], damping: float = DAMPING) -> Float[Array, "K K"]:
    """Add to the diagonal, so that inputs always alike leave it invertible.

    Inputs that were never seen count as usual ones: some day they come.
    """
    diagonal = jnp.diagonal(gram)
    mean = jnp.mean(diagonal)
    usual = jnp.where(mean > 0, mean, 1.0)
    return gram + jnp.diag(jnp.where(diagonal > 0, damping * mean, usual))
