"""The kernel behind `gpu` for many queries: 128 query rows over all pages that they see.

Two warpgroups compute 64 rows each; a third only asks for pages, so that neither waits to ask.
Many rows fill a tensor core by themselves: products are not swapped, and weights go from registers
straight into the second product.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.combine import FLOOR
from pallas_kernels.paged_attention.gpu_kernel import (
    KEYS,
    VALUES,
    Plan,
    masked_scores,
    tiled,
)
from pallas_kernels.paged_attention.gpu_targets import MMA_ROWS, swizzle

WORKERS = 2
ROWS = WORKERS * MMA_ROWS
LAYOUT = plgpu.Layout.WGMMA

# Running weighted values, largest scores, and sums of weights.
type Sums = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """What all warpgroups of an instance know: its place, and the blocks that it sees."""

    plan: Plan
    page: int
    width: int
    dtype: Any
    interpret: bool
    row: Array
    head: Array
    tile: Array
    first: Array
    last: Array
    block: Array
    count: Array

    @property
    def keys(self) -> int:
        """Return how many keys a block has."""
        return self.page * self.plan.pages_per_block

    def slot(self, index: Array) -> Array:
        """Return where in the ring a block is."""
        return lax.rem(index, jnp.int32(self.plan.stages))


def attend(
    q: Float[Array, "B K R W"],
    pool: Float[Array, "L P K 2 S W"],
    factors: Float[Array, "..."],
    layers: Int[Array, " B"],
    table: Int[Array, "B M"],
    bounds: Int[Array, "B tiles 2"],
    limits: Int[Array, "B 2 R"],
    *,
    plan: Plan,
    interpret: Any = None,
) -> tuple[Float[Array, "1 B K R W"], Float[Array, "1 B K R"], Float[Array, "1 B K R"]]:
    """Return sums, peaks and totals; arguments are those of `gpu_kernel.attend`, without codes."""
    del factors
    batch, heads, num_rows, width = q.shape
    rows = (1, batch, heads, num_rows)
    static = {
        "plan": plan,
        "page": pool.shape[4],
        "width": width,
        "dtype": q.dtype,
        "interpret": interpret is not None,
    }
    kernel = plgpu.kernel(
        functools.partial(_attend_tile, static),
        out_type=[
            jax.ShapeDtypeStruct((*rows, width), jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
        grid=(batch * plan.tiles, heads),
        grid_names=("tile", "head"),
        num_threads=WORKERS + 1,
        thread_name="worker",
        scratch_types=_scratch(plan, pool.shape[4], width, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return tuple(kernel(q, pool, layers, table, bounds, limits))


def _scratch(plan: Plan, page: int, width: int, dtype: Any) -> dict[str, Any]:
    keys, stages = page * plan.pages_per_block, plan.stages
    transforms = tiled(swizzle(width), dtype)
    here = plgpu.Barrier(num_arrivals=plan.pages_per_block, num_barriers=stages)
    done = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages)
    return {
        "q_s": plgpu.SMEM((WORKERS, MMA_ROWS, width), dtype, transforms=transforms),
        "keys_s": plgpu.SMEM((stages, keys, width), dtype, transforms=transforms),
        # The last slots belong to the workers: blocks of which some values are not seen.
        "values_s": plgpu.SMEM((stages + WORKERS, keys, width), dtype, transforms=transforms),
        "q_here": plgpu.Barrier(num_barriers=WORKERS),
        "keys_here": here,
        "values_here": here,
        "keys_done": done,
        "values_done": done,
    }


def _attend_tile(static: dict[str, Any], *refs: Any, **scratch: Any) -> None:
    q_g, pool_g, layers_g, table_g, bounds_g, limits_g, *outputs = refs
    tiles = jnp.int32(static["plan"].tiles)
    row, index = (f(lax.axis_index("tile"), tiles) for f in (lax.div, lax.rem))
    keys = jnp.int32(static["page"] * static["plan"].pages_per_block)
    first, last = bounds_g[row, index, 0], bounds_g[row, index, 1]
    block = lax.div(first, keys)
    tile = _Tile(
        **static,
        row=row,
        head=lax.axis_index("head"),
        tile=index,
        first=first,
        last=last,
        block=block,
        count=jnp.maximum(lax.div(last + keys - 1, keys) - block, 0),
    )
    worker = lax.axis_index("worker")
    pl.when(worker < WORKERS)(lambda: _work(tile, worker, q_g, limits_g, outputs, scratch))
    pl.when(worker == WORKERS)(lambda: _ask(tile, pool_g, table_g, layers_g[tile.row], scratch))


def _ask(tile: _Tile, pool_g: Any, table_g: Any, layer: Array, scratch: dict[str, Any]) -> None:
    """Ask for one block after another, as slots become free."""
    page, per_block = tile.page, tile.plan.pages_per_block
    last_page = lax.div(jnp.maximum(tile.last - 1, 0), jnp.int32(page))

    def fetch(index: Array, _: None) -> None:
        slot = tile.slot(index)
        pl.when(index >= tile.plan.stages)(lambda: _wait_until_read(slot, scratch))
        for plane, name in ((KEYS, "keys"), (VALUES, "values")):
            for j in range(per_block):
                number = jnp.minimum((tile.block + index) * per_block + j, last_page)
                plgpu.copy_gmem_to_smem(
                    pool_g.at[layer, table_g[tile.row, number], tile.head, plane],
                    scratch[f"{name}_s"].at[slot, pl.ds(j * page, page)],
                    scratch[f"{name}_here"].at[slot],
                )

    lax.fori_loop(0, tile.count, fetch, None)
    # No barrier may be left half done.
    rest = jnp.maximum(tile.count - tile.plan.stages, 0)
    lax.fori_loop(
        rest, tile.count, lambda index, _: _wait_until_read(tile.slot(index), scratch), None
    )


def _wait_until_read(slot: Array, scratch: dict[str, Any]) -> None:
    """Wait until both workers have read a slot's block."""
    plgpu.barrier_wait(scratch["keys_done"].at[slot])
    plgpu.barrier_wait(scratch["values_done"].at[slot])


def _work(
    tile: _Tile,
    worker: Array,
    q_g: Any,
    limits_g: Any,
    outputs: list[Any],
    scratch: dict[str, Any],
) -> None:
    """Compute the 64 rows of one warpgroup."""
    rows = pl.ds(tile.tile * ROWS + worker * MMA_ROWS, MMA_ROWS)
    queries, here = scratch["q_s"].at[worker], scratch["q_here"].at[worker]
    plgpu.copy_gmem_to_smem(q_g.at[tile.row, tile.head, rows], queries, here)
    per_row = LAYOUT.reduce(1)
    newest, oldest = (
        plgpu.load(limits_g.at[tile.row, i, rows], layout=per_row, optimized=False) for i in (0, 1)
    )
    plgpu.barrier_wait(here)

    def step(index: Array, sums: Sums) -> Sums:
        return _attend_block(tile, worker, index, sums, (newest, oldest), queries, scratch)

    start = (
        plgpu.layout_cast(jnp.zeros((MMA_ROWS, tile.width), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((MMA_ROWS,), FLOOR, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((MMA_ROWS,), jnp.float32), per_row),
    )
    sums = lax.fori_loop(0, tile.count, step, start)
    for output, value in zip(outputs, sums, strict=True):
        place = output.at[0, tile.row, tile.head, rows]
        plgpu.store(place, value, optimized=False)


def _attend_block(
    tile: _Tile,
    worker: Array,
    index: Array,
    sums: Sums,
    limits: tuple[Array, Array],
    queries: Any,
    scratch: dict[str, Any],
) -> Sums:
    """Add a block's keys to running sums by online softmax."""
    acc, peak, total = sums
    slot = tile.slot(index)
    key_pos = (tile.block + index) * tile.keys
    plgpu.barrier_wait(scratch["keys_here"].at[slot])
    products = _scores(tile, queries, scratch["keys_s"].at[slot])
    plgpu.barrier_arrive(scratch["keys_done"].at[slot])
    scores = masked_scores(tile.plan, products, key_pos, limits, layout=LAYOUT, key_axis=1)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    kept = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    total = total * kept + weights.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(kept, acc.shape, [0])
    plgpu.barrier_wait(scratch["values_here"].at[slot])
    place = _seen_values(tile, worker, slot, key_pos, scratch["values_s"])
    acc = _weighed(tile, acc, weights.astype(tile.dtype), scratch["values_s"].at[place])
    plgpu.barrier_arrive(scratch["values_done"].at[slot])
    return acc, new_peak, total


def _seen_values(tile: _Tile, worker: Array, slot: Array, key_pos: Array, values_s: Any) -> Array:
    """Return where a block's values are, with zeros for those that no row of the tile sees."""
    partly = (key_pos < tile.first) | (key_pos + tile.keys > tile.last)
    own = _own_slot(tile, worker, slot)
    columns = swizzle(tile.width) // jnp.dtype(tile.dtype).itemsize

    @pl.when(partly)
    def _() -> None:
        shape = (tile.keys, columns)
        key = key_pos + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT)
        live = (key >= tile.first) & (key < tile.last)
        for start in range(0, tile.width, columns):
            part = pl.ds(start, columns)
            held = plgpu.load(values_s.at[slot, :, part], layout=LAYOUT, optimized=False)
            values_s[own, :, part] = jnp.where(live, held, jnp.zeros_like(held))
        plgpu.commit_smem()

    return jnp.where(partly, own, slot)


def _own_slot(tile: _Tile, worker: Array, slot: Array) -> Array:
    """Return where a worker may change values: not in a slot that the other reads too."""
    del slot
    return tile.plan.stages + worker


def _scores(tile: _Tile, queries: Any, keys: Any) -> Float[Array, "N S"]:
    if tile.interpret:
        # Plain reads: the interpreter's race detector does not see those of a tensor core.
        products = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return products

    def multiply(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, queries, keys.T)
        return accumulator[...]

    shape = (MMA_ROWS, tile.keys)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _weighed(tile: _Tile, acc: Array, weights: Array, values: Any) -> Array:
    if tile.interpret:
        acc = acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, values)

    accumulate: Any = pl.run_state(multiply)
    return accumulate(plgpu.WGMMAAccumulatorRef.init(acc))
