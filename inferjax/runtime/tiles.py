"""Fixed tiles of rows, by which exact mode earns bit-identical results.

XLA computes a row of a matmul differently in batches of different sizes. Here all rows pass through
one loop body of a fixed number of rows, whatever the batch or the length of the prompt.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.unbatched import max_row


def map_tiles(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    rows: Any,
    tile: int,
    live: Bool[Array, " R"] | None = None,
) -> tuple[Any, Any]:
    """Run `body(carry, rows of one tile) -> (carry, outputs)` over tiles, in order.

    `rows` is a pytree of arrays with a common leading axis. Returns the last carry and the outputs
    of all rows; tiles after the last live row are skipped and their outputs are zero.

    There is place for at least two tiles: XLA sees that a slice of the only one is the whole, and
    compiles other code for it (Gemma 3's log-probabilities differed in the last bits).
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    num_used = -(-num_rows // tile)
    num_tiles = max(num_used, 2)
    padded = jax.tree.map(lambda x: _pad(x, num_tiles * tile), rows)
    first = jax.tree.map(lambda x: x[:tile], padded)
    shapes = jax.eval_shape(body, carry, first)[1]
    outputs = jax.tree.map(lambda s: jnp.zeros((num_tiles * tile, *s.shape[1:]), s.dtype), shapes)

    def step(i: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, outputs = state
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * tile, tile), padded)
        carry, new = body(carry, part)
        outputs = jax.tree.map(
            lambda out, y: lax.dynamic_update_slice_in_dim(out, y, i * tile, 0), outputs, new
        )
        return carry, outputs

    trips = _num_trips(num_used, tile, rows, live)
    carry, outputs = lax.fori_loop(0, trips, step, (carry, outputs))
    return carry, jax.tree.map(lambda x: x[:num_rows], outputs)


def _num_trips(
    num_tiles: int, tile: int, rows: Any, live: Bool[Array, " R"] | None
) -> Int[Array, ""]:
    """Return how many tiles hold live rows, as a number that XLA cannot know when it compiles.

    A loop that provably runs once is inlined and its body fused with what surrounds it: other code,
    other rounding. Without a live mask the number is tied to a value: the population count of 32
    bits, shifted by 7, is always zero, but only at run time.
    """
    if live is not None:
        index = jnp.arange(1, live.shape[0] + 1, dtype=jnp.int32)
        return (max_row(jnp.where(live, index, 0)) + tile - 1) // tile
    probe = jnp.ravel(jax.tree.leaves(rows)[0])[:1].astype(jnp.float32)
    bits = lax.bitcast_convert_type(probe, jnp.int32)
    return num_tiles + max_row(lax.population_count(bits) >> 7)


def _pad(x: Array, num_rows: int) -> Array:
    """Repeat the last row: a copy of real values cannot bring NaN or a stray id into a tile."""
    missing = num_rows - x.shape[0]
    return x if missing == 0 else jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)])
