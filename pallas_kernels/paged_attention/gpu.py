"""Paged attention for NVIDIA GPUs, by Mosaic GPU: from the op's arguments to the kernel and back.

All queries of a row that share a key head are rows of one matrix, which is cut into tiles; the
keys of a tile are shared out to `splits` instances of the kernel, as a decode step has too few
tiles for a whole GPU, and `combine` joins what they found.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention import codes, transforms
from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.paged_attention.gpu_targets import (
    MMA_ROWS,
    Target,
    copies_page,
    target_for,
    unavailable_reason,
)
from pallas_kernels.unavailable import KernelUnavailable

DTYPES = ("bfloat16", "float16")
WIDTHS = (64, 96, 128, 256)
PAGE_SIZES = (16, 32, 64)

# Keys that are read at a time: as many as a tensor core multiplies at once.
BLOCK = MMA_ROWS
STAGES = 2
# Registers hold a tile's sums, its rows times the width; of 64 rows some would be spilled.
MAX_ROWS, MAX_SUMS = 32, 4096
# Rows of a tile where queries are many, and heads that its registers have room for.
EXTEND_ROWS, EXTEND_WIDTHS = 2 * MMA_ROWS, (64, 96, 128)
EXTEND_MIN_JAX = (0, 12)
# A smaller share of the keys is not worth an instance and its part in `combine`.
MIN_SHARE = 256


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
    target: str | None = None,
    splits: int | None = None,
    extend: bool | None = None,
    interpret: Any = None,
    lse: bool = False,
) -> Any:
    """Attend on the GPU; see the package for the contract.

    `target` names the kind of GPU (`gpu_targets.TARGETS`) where none is at hand. `splits` forces
    into how many shares the keys are cut, `extend` whether the kernel for many queries runs.
    `interpret` (Mosaic's `InterpretGPUParams`) computes on a CPU what the GPU would. Weights are
    rounded to q's dtype; derivatives are those of XLA's form.

    Raises: KernelUnavailable without a GPU, or for what the kernel does not know.
    """
    chosen = target_for(target)
    reason = unsupported(q, pool, value_dim, chosen)
    if reason is not None:
        raise KernelUnavailable(reason)
    options = (chosen, splits, extend, interpret, lse)
    attend = _attention(float(scale), value_dim, window, softcap, *options)
    arrays = (q, pool, layer, block_table, positions, lengths, sinks, factors)
    return attend(*transforms.operands(*arrays))


def unavailable(q: Array, pool: Array, value_dim: int) -> str | None:
    """Return why the GPU at hand cannot compute this attention, or None when it can."""
    return unavailable_reason() or unsupported(q, pool, value_dim, target_for(None))


def unsupported(q: Array, pool: Array, value_dim: int, target: Target) -> str | None:
    """Return why the kernel cannot compute this attention on a target, or None when it can."""
    planes, page_size, width = pool.shape[3:]
    if planes != 2 or value_dim != width:
        return "the GPU kernel does not attend to latents"
    coded = pool.dtype.name in codes.LARGEST
    if q.dtype.name not in DTYPES or not (coded or pool.dtype == q.dtype):
        return (
            f"the GPU kernel takes queries of {' or '.join(DTYPES)} and pages of the same or of "
            f"codes, not {q.dtype.name} and {pool.dtype.name}"
        )
    if width not in WIDTHS:
        return f"the GPU kernel takes heads of {', '.join(map(str, WIDTHS))}, not {width}"
    if coded and target.copies != "tma":
        return "the GPU kernel reads codes on sm_90 and later"
    # A box of memory lands on a multiple of 128 bytes: the factors of 64 tokens.
    sizes = [s for s in PAGE_SIZES if (s == BLOCK if coded else copies_page(target, s, width))]
    if page_size not in sizes:
        return f"the GPU kernel reads pages of {', '.join(map(str, sizes))}, not {page_size}"
    return None


@functools.lru_cache(maxsize=256)
def _attention(
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    target: Target,
    splits: int | None,
    extend: bool | None,
    interpret: Any,
    lse: bool,
) -> transforms.Attention:
    def run(*arrays: Array) -> Any:
        options = {"target": target, "splits": splits, "extend": extend, "interpret": interpret}
        found = attend(*arrays, scale=scale, window=window, softcap=softcap, **options)
        return found if lse else found[0]

    return transforms.transformable(
        run, scale=scale, value_dim=value_dim, window=window, softcap=softcap, lse=lse
    )


def attend(
    q: Float[Array, "B T K G W"],
    pool: Num[Array, "L P K 2 S W"],
    factors: Float[Array, "..."],
    layers: Int[Array, " B"],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sinks: Float[Array, "R K G"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    target: Target,
    splits: int | None = None,
    extend: bool | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T K G W"], Float[Array, "B T K G"]]:
    """Return attention and the logarithm of each query's sum of weights, -inf without keys."""
    # A second of imports that only GPUs need.
    from pallas_kernels.paged_attention import gpu_extend, gpu_kernel

    batch, tokens, heads, group, width = q.shape
    num_keys = block_table.shape[1] * pool.shape[4]
    reason = _no_extend(q, pool, target)
    if extend is None:
        extend = splits is None and reason is None and _fills(q, target)
    elif extend and reason is not None:
        raise KernelUnavailable(reason)
    rows = EXTEND_ROWS if extend else _rows(tokens * group, width)
    tiles = -(-tokens * group // rows)
    plan = gpu_kernel.Plan(
        target=target,
        rows=rows,
        tiles=tiles,
        pages_per_block=BLOCK // pool.shape[4],
        stages=STAGES,
        splits=1 if extend else splits or _splits(target, batch * tiles * heads, num_keys),
        least_blocks=MIN_SHARE // BLOCK if splits is None else 1,
        scale=scale,
        softcap=softcap,
    )
    limits = _limits(positions, jnp.minimum(lengths, num_keys), window)
    limits = _padded(jnp.repeat(limits, group, axis=2), rows * tiles, -1)
    by_head = q.transpose(0, 2, 1, 3, 4).reshape(batch, heads, tokens * group, width)
    parts = (gpu_extend if extend else gpu_kernel).attend(
        _padded(by_head.swapaxes(2, 3), rows * tiles, 0).swapaxes(2, 3),
        pool,
        factors,
        _in_range(layers, pool.shape[0]),
        _in_range(block_table, pool.shape[1]),
        _bounds(limits, tiles),
        limits,
        plan=plan,
        interpret=interpret,
    )
    apart = (plan.splits, batch, heads, tokens, group)
    sums, peaks, totals = (
        x[:, :, :, : tokens * group].reshape(*apart, *x.shape[4:]) for x in parts
    )
    out, lse = combine(sums, peaks, totals, sinks[:, :, None] if sinks.shape[0] else None)
    return out.transpose(0, 2, 1, 3, 4).astype(q.dtype), lse.transpose(0, 2, 1, 3)


def _no_extend(q: Array, pool: Array, target: Target) -> str | None:
    """Return why the kernel for many queries cannot compute this attention, or None."""
    if target.product != "wgmma" or jax.__version_info__ < EXTEND_MIN_JAX:
        return "the GPU kernel for many queries is for sm_90, and jax 0.12"
    if q.shape[-1] not in EXTEND_WIDTHS or pool.dtype != q.dtype:
        widths = ", ".join(map(str, EXTEND_WIDTHS))
        return f"the GPU kernel for many queries takes heads of {widths}, and no codes"
    return None


def _fills(q: Array, target: Target) -> bool:
    """Return whether queries are so many that tiles of them, without splits, fill the GPU."""
    batch, tokens, heads, group, _ = q.shape
    return batch * heads * (tokens * group // EXTEND_ROWS) >= target.num_sms


def _rows(num_rows: int, width: int) -> int:
    """Return how many rows a tile has, a power of two."""
    rows = 8
    while rows < min(num_rows, MAX_ROWS, MAX_SUMS // width):
        rows *= 2
    return rows


def _splits(target: Target, instances: int, num_keys: int) -> int:
    """Return into how many shares keys are cut, a power of two: two instances keep an SM busy."""
    splits = 1
    while splits * instances < 2 * target.num_sms and splits * MIN_SHARE < num_keys:
        splits *= 2
    return splits


def _limits(
    positions: Int[Array, "B T"], lengths: Int[Array, " B"], window: int | None
) -> Int[Array, "B 2 T"]:
    """Return the newest and the oldest key that each query sees; a newest of -1 is none."""
    newest = jnp.where(positions >= 0, jnp.minimum(positions, lengths[:, None] - 1), -1)
    span = positions if window is None else window - 1
    return jnp.stack([newest, jnp.maximum(positions - span, 0)], axis=1)


def _bounds(limits: Int[Array, "B 2 R"], tiles: int) -> Int[Array, "B tiles 2"]:
    """Return the first key that any row of a tile sees, and the key after the last."""
    newest, oldest = jnp.moveaxis(limits.reshape(limits.shape[0], 2, tiles, -1), 1, 0)
    last = newest.max(-1) + 1
    first = jnp.where(newest >= 0, oldest, last[..., None]).min(-1)
    return jnp.stack([first, last], axis=-1)


def _padded(x: Array, size: int, value: int) -> Array:
    pad = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    return jnp.pad(x, pad, constant_values=value)


def _in_range(ids: Int[Array, "..."], size: int) -> Int[Array, "..."]:
    """Return what JAX's indexing makes of numbers out of range: a box of memory has to exist."""
    return jnp.clip(jnp.where(ids < 0, ids + size, ids), 0, size - 1)
