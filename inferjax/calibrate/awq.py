"""AWQ: input channels that carry much are scaled up before rounding, and ranges are clipped."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from inferjax.calibrate.folds import folds_of
from inferjax.calibrate.grids import damped, diagonal_blocks, rounding_errors, searched_grid
from inferjax.calibrate.products import Path, at, matrix_at
from inferjax.config import LayerSpec
from inferjax.params import LayerParams
from inferjax.quant.schemes import Scheme, grid_of, group_rows, pack_groups
from inferjax.quant.watched import InputStatistics
from pallas_kernels.quant_matmul import PackedWeight

# Exponents of a channel's mean magnitude that are tried: 0 to 0.95.
NUM_EXPONENTS = 20


@functools.partial(jax.jit, static_argnames="scheme")
def pack(matrix: Float[Array, "K N"], statistics: InputStatistics, scheme: Scheme) -> PackedWeight:
    """Round to nearest, each group within the range that leaves its product with the inputs best.

    Source: AWQ's authors' code, auto_clip; arXiv 2306.00978, section 3.
    """
    grouped = group_rows(matrix.astype(jnp.float32), scheme)
    grams = diagonal_blocks(damped(statistics.gram), grouped.shape[1])
    grid = searched_grid(grouped, lambda errors: (errors * (grams @ errors)).sum(1), scheme)
    return pack_groups(grouped, grid, scheme, matrix.shape[0])


def rescale(
    layer: LayerParams,
    spec: LayerSpec,
    products: LayerParams,
    scheme: Scheme,
    collect: Callable[[LayerParams, Path], InputStatistics],
) -> LayerParams:
    """Scale the channels of every fold by a power of what they carry; the layer's result stays.

    Source: AWQ, arXiv 2306.00978, section 3.2, with the error of a product in place of a block's.
    """
    for fold in folds_of(spec, layer):
        paths = [path for path, _ in fold.readers if at(products, path).num_in_axes]
        statistics = [collect(layer, path) for path in paths]
        matrices = [matrix_at(layer, products, path) for path in paths]
        if paths:
            scales = _best_scales(matrices, statistics, scheme, fold.shape, fold.shared_axis)
            layer = fold.apply(layer, scales)
    return layer


@functools.partial(jax.jit, static_argnames=("scheme", "shape", "shared_axis"))
def _best_scales(
    matrices: list[Float[Array, "... K _"]],
    statistics: list[InputStatistics],
    scheme: Scheme,
    shape: tuple[int, ...],
    shared_axis: int | None,
) -> Float[Array, "..."]:
    """Return the scales, of those tried, with which rounding changes the products least."""
    carried = _mean_magnitudes(statistics, shape, shared_axis)

    def step(best: tuple[Array, Array], exponent: Array) -> tuple[tuple[Array, Array], None]:
        powers = carried**exponent
        scales = powers / jnp.sqrt(powers.max() * powers.min())
        parts = zip(matrices, statistics, strict=True)
        found = sum(_loss(m, s, scales, scheme) for m, s in parts)
        better = found < best[0]
        return (jnp.where(better, found, best[0]), jnp.where(better, scales, best[1])), None

    exponents = jnp.arange(NUM_EXPONENTS, dtype=jnp.float32) / NUM_EXPONENTS
    return lax.scan(step, (jnp.float32(jnp.inf), jnp.ones(shape)), exponents)[0][1]


def _mean_magnitudes(
    statistics: list[InputStatistics], shape: tuple[int, ...], shared_axis: int | None
) -> Float[Array, "..."]:
    """Return what each channel carries on average; those that carry nothing are taken as usual."""
    sums, rows = jnp.zeros(shape, jnp.float32), jnp.float32(0.0)
    for part in statistics:
        if part.magnitude.size == math.prod(shape):
            sums = sums + part.magnitude.reshape(shape)
            rows = rows + part.num_rows.reshape(-1, *(1,) * (len(shape) - 1))
        else:
            sums, rows = sums + part.magnitude.sum(0).reshape(shape), rows + part.num_rows.sum()
    means = sums / jnp.maximum(rows, 1.0)
    if shared_axis is not None:
        means = jnp.broadcast_to(means.mean(shared_axis, keepdims=True), shape)
    count = (means > 0).sum().astype(jnp.float32)
    usual = means.sum() / jnp.maximum(count, 1.0)
    return jnp.where(means > 0, jnp.maximum(means, 1e-4 * usual), jnp.where(usual > 0, usual, 1.0))


def _loss(
    matrix: Float[Array, "*stack K N"],
    statistics: InputStatistics,
    scales: Float[Array, "..."],
    scheme: Scheme,
) -> Float[Array, ""]:
    """Return the squared change of a product when the scaled matrix is rounded."""
    rows = matrix.shape[:-1]
    scales = scales.reshape(rows) if scales.size == math.prod(rows) else scales.reshape(-1)
    scales = jnp.broadcast_to(scales, rows)[..., None]
    grouped = group_rows(matrix * scales, scheme)
    errors = rounding_errors(grouped, grid_of(grouped, scheme), scheme)
    errors = errors.reshape(*rows[:-1], -1, matrix.shape[-1])[..., : rows[-1], :] / scales
    return jnp.sum(errors * (statistics.gram @ errors))
