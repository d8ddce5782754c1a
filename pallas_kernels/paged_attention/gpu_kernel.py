"""The kernel behind `gpu`: a tile of query rows over one share of a row's pages.

Products are swapped: keys times queries, then values times weights, both transposed. A tensor core
multiplies at least 64 rows at a time, and a decode step has a handful of queries but always a page
of keys: swapped, 64 keys fill the rows and the queries are columns, of which 8 are enough.

Tensor cores multiply 16-bit numbers: codes of 8 bits are widened into shared memory first, which is
faster than the memory they come from. Their factors multiply scores, and weights.

A block of keys is a whole number of pages. Blocks come through a ring of `stages` slots in shared
memory; the next is asked for as soon as a slot has been read by every warp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.combine import FLOOR, LOG2E
from pallas_kernels.paged_attention.gpu_targets import MMA_ROWS, Target, swizzle

MASKED = -1e30
KEYS, VALUES = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a kernel is compiled for, beside the shapes of its arrays.

    Keys are shared out to `splits` instances, in shares of `least_blocks` or more. What a row's
    shares are, and so its bits, then does not depend on whether a longer table has more splits.
    """

    target: Target
    rows: int
    tiles: int
    pages_per_block: int
    stages: int
    splits: int
    least_blocks: int
    scale: float
    softcap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """A kernel's static sizes."""

    plan: Plan
    dtype: Any
    pool_dtype: Any
    page: int
    width: int
    interpret: bool

    @property
    def keys(self) -> int:
        """Return how many keys a block has."""
        return self.page * self.plan.pages_per_block

    @property
    def starts(self) -> tuple[int, ...]:
        """Return where slices of the values' width start; each is multiplied apart.

        Slices of a width that is no multiple of what a tensor core multiplies overlap.
        """
        return (0,) if self.width % MMA_ROWS == 0 else (0, self.width - MMA_ROWS)

    @property
    def slice_width(self) -> int:
        """Return how wide a slice is."""
        return self.width if len(self.starts) == 1 else MMA_ROWS

    @property
    def coded(self) -> bool:
        """Return whether pages hold codes."""
        return self.pool_dtype != self.dtype

    @property
    def layout(self) -> Any:
        """Return how threads hold a product."""
        if self.plan.target.product == "wgmma":
            return plgpu.Layout.WGMMA
        return plgpu.Layout.MMA_ACC(self.dtype)

    @property
    def tile_width(self) -> int:
        """Return how many columns of an operand lie together."""
        return swizzle(self.width) // jnp.dtype(self.dtype).itemsize

    def zeros(self, *shape: int) -> Array:
        """Return float32 zeros as a product holds them."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.layout)


def attend(
    q: Float[Array, "B K R W"],
    pool: Num[Array, "L P K 2 S W"],
    factors: Float[Array, "..."],
    layers: Int[Array, " B"],
    table: Int[Array, "B M"],
    bounds: Int[Array, "B tiles 2"],
    limits: Int[Array, "B 2 R"],
    *,
    plan: Plan,
    interpret: Any = None,
) -> tuple[Float[Array, "N B K R W"], Float[Array, "N B K R"], Float[Array, "N B K R"]]:
    """Return sums, peaks and totals of every split, as `combine` joins them.

    A tile of `plan.rows` rows sees keys from `bounds[..., 0]` to before `bounds[..., 1]`, each of
    its rows those from `limits[:, 1]` to `limits[:, 0]`. Numbers of layers and pages are in range.
    `factors` are those of a pool of codes, [L, P, K, 2, S], and otherwise not looked at.
    """
    batch, heads, _, width = q.shape
    sizes = _Sizes(
        plan=plan,
        dtype=q.dtype,
        pool_dtype=pool.dtype,
        page=pool.shape[4],
        width=width,
        interpret=interpret is not None,
    )
    rows = (plan.splits, batch, heads, plan.tiles, plan.rows)
    wide = len(sizes.starts) * sizes.slice_width
    kernel = plgpu.kernel(
        functools.partial(_attend_tile, sizes),
        out_type=[
            jax.ShapeDtypeStruct((*rows[:4], wide, plan.rows), jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
        grid=(batch * plan.tiles, heads, plan.splits),
        grid_names=("tile", "head", "split"),
        scratch_types=_scratch(sizes),
        # exp2 by its instruction, with an error of 2^-22.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    sums, peaks, totals = kernel(q, pool, factors, layers, table, bounds, limits)
    sums = _joined(sizes, sums).swapaxes(-1, -2)
    flat = (plan.splits, batch, heads, plan.tiles * plan.rows)
    return sums.reshape(*flat, width), peaks.reshape(flat), totals.reshape(flat)


def _joined(sizes: _Sizes, sums: Float[Array, "... V N"]) -> Float[Array, "... W N"]:
    """Return slices of a width side by side, without what two of them have both."""
    if len(sizes.starts) == 1:
        return sums
    fresh = sizes.width - MMA_ROWS
    return jnp.concatenate([sums[..., :MMA_ROWS, :], sums[..., -fresh:, :]], axis=-2)


_RING = (
    "keys_s",
    "values_s",
    "keys_here",
    "values_here",
    "key_factors_s",
    "value_factors_s",
)


def _scratch(sizes: _Sizes) -> dict[str, Any]:
    plan = sizes.plan
    operand = tiled(swizzle(sizes.width), sizes.dtype)
    pages = operand
    if sizes.coded:
        # The largest power of two that divides a row of bytes.
        pages = tiled(min(128, sizes.width & -sizes.width), sizes.pool_dtype)
    ring = plgpu.SMEM((plan.stages, sizes.keys, sizes.width), sizes.pool_dtype, transforms=pages)
    scratch = {"keys_s": ring, "values_s": ring}
    if plan.target.copies == "cp.async":
        return scratch | {"weights_s": plgpu.SMEM((sizes.keys, plan.rows), sizes.dtype)}
    if sizes.coded:
        wide_codes = plgpu.SMEM((sizes.keys, sizes.width), sizes.dtype, transforms=operand)
        key_factors = plgpu.SMEM((plan.stages, sizes.keys), jnp.bfloat16)
        scratch |= {"wide_keys_s": wide_codes, "wide_values_s": wide_codes}
        scratch |= {"key_factors_s": key_factors, "value_factors_s": key_factors}
    arrivals = plan.pages_per_block * (2 if sizes.coded else 1)
    barriers = plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages)
    wide = len(sizes.starts) * sizes.slice_width
    per_row = plgpu.SMEM((plan.rows,), jnp.float32)
    sums = tiled(min(128, 4 * plan.rows), jnp.float32)
    return scratch | {
        "q_s": plgpu.SMEM((plan.rows, sizes.width), sizes.dtype, transforms=operand),
        "q_here": plgpu.Barrier(),
        "weights_s": plgpu.SMEM((plan.rows, sizes.keys), sizes.dtype, transforms=operand),
        "keys_here": barriers,
        "values_here": barriers,
        "sums_s": plgpu.SMEM((wide, plan.rows), jnp.float32, transforms=sums),
        "peaks_s": per_row,
        "totals_s": per_row,
    }


def tiled(swizzled: int, dtype: Any) -> tuple[Any, ...]:
    """Return how an operand of a tensor core lies in shared memory."""
    columns = swizzled // jnp.dtype(dtype).itemsize
    # Pyright takes these classes for abstract, which they are not.
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzled)  # pyright: ignore[reportAbstractUsage]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The keys of one instance: some of the blocks that its tile sees."""

    first: Array
    last: Array
    block: Array
    count: Array


def _share_of(sizes: _Sizes, first: Array, last: Array) -> _Share:
    """Return an even share of the tile's blocks; the last are empty when blocks are few."""
    keys, splits = jnp.int32(sizes.keys), jnp.int32(sizes.plan.splits)
    begin = lax.div(first, keys)
    end = lax.div(last + keys - 1, keys)
    each = jnp.maximum(lax.div(end - begin + splits - 1, splits), sizes.plan.least_blocks)
    block = begin + lax.axis_index("split") * each
    count = jnp.maximum(jnp.minimum(block + each, end) - block, 0)
    return _Share(first=first, last=last, block=block, count=count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring:
    """Blocks on their way through shared memory, by TMA: barriers tell that a block is here."""

    sizes: _Sizes
    share: _Share
    page_at: Callable[[Array, int], Any]
    factors_at: Callable[[Array, int], Any]
    keys_s: Any
    values_s: Any
    key_factors_s: Any = None
    value_factors_s: Any = None
    keys_here: Any = None
    values_here: Any = None

    def slot(self, index: Array) -> Array:
        """Return where in the ring a block is."""
        return lax.rem(index, jnp.int32(self.sizes.plan.stages))

    def fill(self) -> None:
        """Ask for as many blocks as the ring has slots."""
        for index in range(self.sizes.plan.stages):
            self.fetch(jnp.int32(index))

    def fetch(self, index: Array) -> None:
        """Ask for a block, unless there is none."""
        pl.when(index < self.share.count)(lambda: self.copy(index, self.slot(index)))

    def copy(self, index: Array, slot: Array) -> None:
        """Ask for a block's pages: a box of memory for the keys of each, and one for its values."""
        page, per_block = self.sizes.page, self.sizes.plan.pages_per_block
        last_page = lax.div(jnp.maximum(self.share.last - 1, 0), jnp.int32(page))
        for plane, ring, factors, here in (
            (KEYS, self.keys_s, self.key_factors_s, self.keys_here),
            (VALUES, self.values_s, self.value_factors_s, self.values_here),
        ):
            there = None if here is None else here.at[slot]
            for j in range(per_block):
                # Beyond the last page a block is masked: any page will do, and this one is at hand.
                number = jnp.minimum((self.share.block + index) * per_block + j, last_page)
                place = pl.ds(j * page, page)
                self.ask(self.page_at(number, plane), ring.at[slot, place], there)
                if factors is not None:
                    self.ask(self.factors_at(number, plane), factors.at[slot, place], there)

    def ask(self, source: Any, place: Any, here: Any) -> None:
        """Ask for a box of memory; a barrier tells that it is here."""
        plgpu.copy_gmem_to_smem(source, place, here)

    def wait_for_keys(self, slot: Array) -> None:
        """Wait until a block's keys are here."""
        plgpu.barrier_wait(self.keys_here.at[slot])

    def wait_for_values(self, slot: Array) -> None:
        """Wait until a block's values are here."""
        plgpu.barrier_wait(self.values_here.at[slot])

    def join_warps(self) -> None:
        """Wait until every warp is here, and what it has written can be read by all."""
        plgpu.commit_smem()


class _RingOfCopies(_Ring):
    """The same by `cp.async`, whose copies are only counted: a thread waits for all but the last n.

    So every step has to ask for a block, if need be one that is here already. A wait also joins the
    warps. The interpreter does not know these copies: only their compilation is tested.
    """

    def ask(self, source: Any, place: Any, here: Any) -> None:
        """Ask for a box of memory."""
        del here
        promise = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(source, place, oob_mode=promise)

    def fetch(self, index: Array) -> None:
        """Ask for a block; for the last one again where there is none."""
        last = jnp.maximum(self.share.count - 1, 0)
        self.copy(jnp.minimum(index, last), self.slot(index))

    def wait_for_keys(self, slot: Array) -> None:  # noqa: ARG002
        """Wait for all but what was asked for after this block's keys."""
        plan = self.sizes.plan
        plgpu.wait_gmem_to_smem(plan.pages_per_block * (2 * plan.stages - 1))

    def wait_for_values(self, slot: Array) -> None:  # noqa: ARG002
        """Wait for all but the blocks after this one."""
        plan = self.sizes.plan
        plgpu.wait_gmem_to_smem(plan.pages_per_block * (2 * plan.stages - 2))

    def join_warps(self) -> None:
        """Wait for the other warps; this block's copies are here."""
        self.wait_for_values(jnp.int32(0))


# Running weighted values (a slice of the width each), largest scores, and sums of weights.
type Sums = tuple[tuple[Array, ...], Array, Array]


def _attend_tile(
    sizes: _Sizes,
    q_g: Any,
    pool_g: Any,
    factors_g: Any,
    layers_g: Any,
    table_g: Any,
    bounds_g: Any,
    limits_g: Any,
    *outputs: Any,
    **scratch: Any,
) -> None:
    """Compute one tile of rows over one share of its keys."""
    plan = sizes.plan
    head, split = lax.axis_index("head"), lax.axis_index("split")
    row = lax.div(lax.axis_index("tile"), jnp.int32(plan.tiles))
    tile = lax.rem(lax.axis_index("tile"), jnp.int32(plan.tiles))
    layer = layers_g[row]
    make_ring = _Ring if plan.target.copies == "tma" else _RingOfCopies
    ring = make_ring(
        sizes=sizes,
        share=_share_of(sizes, bounds_g[row, tile, 0], bounds_g[row, tile, 1]),
        page_at=lambda number, plane: pool_g.at[layer, table_g[row, number], head, plane],
        factors_at=lambda number, plane: factors_g.at[layer, table_g[row, number], head, plane],
        **{name: scratch[name] for name in _RING if name in scratch},
    )
    rows = pl.ds(tile * plan.rows, plan.rows)
    queries = q_g.at[row, head, rows]
    if "q_s" in scratch:
        plgpu.copy_gmem_to_smem(queries, scratch["q_s"], scratch["q_here"])
        queries = scratch["q_s"]
    ring.fill()
    per_row = sizes.layout.reduce(0)
    newest, oldest = (
        plgpu.load(limits_g.at[row, i, rows], layout=per_row, optimized=False) for i in (0, 1)
    )
    if "q_s" in scratch:
        plgpu.barrier_wait(scratch["q_here"])

    # [keys, rows]; transposed in memory where an instruction stores it so.
    weights_s = scratch["weights_s"] if "q_s" not in scratch else scratch["weights_s"].T

    def step(index: Array, sums: Sums) -> Sums:
        wide = scratch.get("wide_keys_s"), scratch.get("wide_values_s")
        return _attend_block(sizes, ring, index, sums, (newest, oldest), queries, weights_s, wide)

    start = (
        tuple(sizes.zeros(sizes.slice_width, plan.rows) for _ in sizes.starts),
        plgpu.layout_cast(jnp.full((plan.rows,), FLOOR, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((plan.rows,), jnp.float32), per_row),
    )
    sums = lax.fori_loop(0, ring.share.count, step, start)
    _write(sizes, sums, [output.at[split, row, head, tile] for output in outputs], scratch)


def _write(sizes: _Sizes, sums: Sums, outputs: list[Any], scratch: dict[str, Any]) -> None:
    """Write sums, peaks and totals to memory."""
    slices, peaks, totals = sums
    parts = [pl.ds(i * sizes.slice_width, sizes.slice_width) for i in range(len(slices))]
    if sizes.plan.target.copies == "cp.async":
        for part, values in zip(parts, slices, strict=True):
            plgpu.store(outputs[0].at[part], values, optimized=False)
        plgpu.store(outputs[1], peaks, optimized=False)
        plgpu.store(outputs[2], totals, optimized=False)
        # No copy may be under way when an instance ends.
        plgpu.wait_gmem_to_smem(0)
        return
    for part, values in zip(parts, slices, strict=True):
        scratch["sums_s"][part] = values
    scratch["peaks_s"][...] = peaks
    scratch["totals_s"][...] = totals
    plgpu.commit_smem()
    for name, output in zip(("sums_s", "peaks_s", "totals_s"), outputs, strict=True):
        plgpu.copy_smem_to_gmem(scratch[name], output)
    plgpu.wait_smem_to_gmem(0)


def _attend_block(
    sizes: _Sizes,
    ring: _Ring,
    index: Array,
    sums: Sums,
    limits: tuple[Array, Array],
    queries: Any,
    weights_s: Any,
    wide: tuple[Any, Any],
) -> Sums:
    """Add a block's keys to running sums by online softmax; ask for the one that takes its slot."""
    slices, peak, total = sums
    slot = ring.slot(index)
    keys, values = ring.keys_s.at[slot], ring.values_s.at[slot]
    key_pos = (ring.share.block + index) * sizes.keys
    ring.wait_for_keys(slot)
    if sizes.coded:
        keys = _widened(sizes, keys, wide[0])
        ring.join_warps()
    products = _product(sizes, None, (sizes.keys, sizes.plan.rows), keys, queries.T)
    if sizes.coded:
        products = products * _factors(sizes, ring.key_factors_s.at[slot])
    scores = masked_scores(sizes.plan, products, key_pos, limits, layout=sizes.layout, key_axis=0)
    new_peak = jnp.maximum(peak, scores.max(axis=0))
    kept = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [1]))
    total = total * kept + weights.sum(axis=0)
    ring.wait_for_values(slot)
    if sizes.coded:
        # A code is finite, its factor may not be: no weight, no factor.
        weighed = weights * _factors(sizes, ring.value_factors_s.at[slot])
        weights = jnp.where(weights > 0.0, weighed, 0.0)
        values = _widened(sizes, values, wide[1])
    else:
        _blank_dead_values(sizes, values, key_pos, ring.share)
    _store_weights(sizes, weights, weights_s)
    # Every warp reads what all of them wrote.
    ring.join_warps()
    slices = tuple(
        _weighed(
            sizes,
            part * lax.broadcast_in_dim(kept, part.shape, [1]),
            values,
            start,
            weights_s,
        )
        for part, start in zip(slices, sizes.starts, strict=True)
    )
    # Every warp has read the slot and the weights before either is written again.
    ring.join_warps()
    ring.fetch(index + sizes.plan.stages)
    return slices, new_peak, total


def _store_weights(sizes: _Sizes, weights: Float[Array, "S N"], weights_s: Any) -> None:
    if sizes.plan.target.copies == "cp.async":
        plgpu.store(weights_s, weights.astype(sizes.dtype), optimized=False)
    else:
        weights_s[...] = weights.astype(sizes.dtype)


def _widened(sizes: _Sizes, codes_s: Any, wide_s: Any) -> Any:
    """Write what codes stand for before factors, which 16 bits hold exactly."""
    codes = codes_s[...]
    if sizes.pool_dtype == jnp.uint8:
        # No instruction makes bfloat16 of float8.
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float16)
        if sizes.dtype != jnp.float16:
            codes = codes.astype(jnp.float32)
    wide_s[...] = codes.astype(sizes.dtype)
    return wide_s


def _factors(sizes: _Sizes, factors_s: Any) -> Float[Array, "S N"]:
    """Return the factor of every key, for all rows."""
    held = plgpu.load(factors_s, layout=sizes.layout.reduce(1), optimized=False)
    return lax.broadcast_in_dim(held.astype(jnp.float32), (sizes.keys, sizes.plan.rows), [0])


def masked_scores(
    plan: Plan,
    products: Float[Array, "..."],
    key_pos: Array,
    limits: tuple[Array, Array],
    *,
    layout: Any,
    key_axis: int,
) -> Float[Array, "..."]:
    """Return scores times log2(e), so that weights are powers of two; `MASKED` where not seen."""
    if plan.softcap is None:
        scores = products * (plan.scale * LOG2E)
    else:
        # The hardware's tanh is off by 2^-11 of a score that may be large; this by 2^-22.
        powers = jnp.exp2(products * (2 * LOG2E * plan.scale / plan.softcap))
        scores = plan.softcap * LOG2E - (2 * plan.softcap * LOG2E) / (powers + 1.0)
    key = key_pos + plgpu.broadcasted_iota(jnp.int32, scores.shape, key_axis, layout=layout)
    newest, oldest = (lax.broadcast_in_dim(limit, scores.shape, [1 - key_axis]) for limit in limits)
    return jnp.where((key <= newest) & (key >= oldest), scores, MASKED)


def _blank_dead_values(sizes: _Sizes, values: Any, key_pos: Array, share: _Share) -> None:
    """Put zeros where a block is not all of it seen: no weight, not even zero, takes a NaN away."""

    @pl.when((key_pos < share.first) | (key_pos + sizes.keys > share.last))
    def _() -> None:
        shape = (sizes.keys, sizes.tile_width)
        key = key_pos + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=sizes.layout)
        live = (key >= share.first) & (key < share.last)
        for start in range(0, sizes.width, sizes.tile_width):
            part = values.at[:, pl.ds(start, sizes.tile_width)]
            held = plgpu.load(part, layout=sizes.layout, optimized=False)
            part[...] = jnp.where(live, held, jnp.zeros_like(held))


def _weighed(sizes: _Sizes, sums: Array, values: Any, start: int, weights: Any) -> Array:
    """Add values times weights to a slice of the sums."""
    part = values.at[:, pl.ds(start, sizes.slice_width)]
    return _product(sizes, sums, (sizes.slice_width, sizes.plan.rows), part.T, weights)


def _product(
    sizes: _Sizes, sums: Array | None, shape: tuple[int, int], left: Any, right: Any
) -> Array:
    """Return left times right, both in shared memory, added to sums if there are any."""
    if sizes.interpret:
        # Plain reads: the interpreter's race detector does not see those of a tensor core.
        product = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    elif sizes.plan.target.product == "mma":
        layouts = plgpu.Layout.MMA_LHS(sizes.dtype), plgpu.Layout.MMA_RHS(sizes.dtype)
        operands = [
            plgpu.load(ref, layout=layout, optimized=False)
            for ref, layout in zip((left, right), layouts, strict=True)
        ]
        return plgpu.mma(sizes.zeros(*shape) if sums is None else sums, *operands)
    else:

        def multiply(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, left, right)
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    return product if sums is None else sums + product
