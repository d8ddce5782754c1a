"""Quantization layer by layer: each is rounded for the inputs that the rounded ones before give.

What is kept of a calibration text is its residual stream, one array [S, D] a window, and sums over
its rows for one product at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, Float

from inferjax.calibrate.products import (
    Path,
    at,
    collect,
    layer_output,
    matrix_at,
    product_paths,
    put,
)
from inferjax.calibrate.recipes import Recipe, recipe_named
from inferjax.config import Exec, LayerSpec, ModelConfig
from inferjax.errors import InvalidInput, UnsupportedConfig
from inferjax.layers.norm import normalize
from inferjax.models import quantized
from inferjax.models.decoder import embed, project_out
from inferjax.models.params import ArraySpec, check_params, param_spec
from inferjax.params import LayerParams, Params
from inferjax.quant.leaf import PackedLeaf, as_matrix, is_packed, widen
from inferjax.quant.schemes import Scheme, scheme_named
from inferjax.quant.watched import InputStatistics, statistics_of
from inferjax.runtime.score import checked
from pallas_kernels.quant_matmul import QUANTIZED, PackedWeight


def quantize(
    params: Params,
    config: ModelConfig,
    scheme: str,
    *,
    recipe: str = "gptq",
    tokens: Any = None,
    progress: bool = False,
) -> Params:
    """Store the weights of the products by a scheme, chosen for a text's activations.

    `tokens` [B, S] are windows of a text like those that the model is for; "rtn" needs none. The
    result has the tree that rounding to nearest gives. A table that is the head as well is rounded
    for what the original model's head reads, which costs a pass more; one whose rows are only read
    is rounded to nearest. Runs on one device.

    Raises: UnsupportedConfig for an unknown scheme or recipe, a scheme that rounds without a
      choice, or values that its scales cannot hold; InvalidInput where there are no tokens;
      ShapeError, InvalidInput, RequestTooLong for what is no batch of the model's.
    """
    how, method = scheme_named(scheme), recipe_named(recipe)
    check_params(params, config)
    if method is None:
        return quantized.quantize(params, config, scheme)
    if how.format not in QUANTIZED:
        raise UnsupportedConfig(
            f"recipe={recipe!r} with {scheme!r}",
            why="a value has one nearest neighbour there, and no scale to choose",
            fix='use recipe="rtn"',
        )
    if not any(map(np.size, jax.tree.leaves(tokens))):
        raise InvalidInput(
            f"recipe={recipe!r} without a token",
            why="it chooses codes for what the model computes on a text",
            fix='pass tokens=, windows [B, S] of a text, or recipe="rtn"',
        )
    tokens, _ = checked(params, config, tokens, None, Exec())
    packed = _quantize(params, config, how, method, tokens, progress)
    quantized.check_scales(packed, params)
    return packed


def _quantize(
    params: Params,
    config: ModelConfig,
    scheme: Scheme,
    recipe: Recipe,
    tokens: Array,
    progress: bool,
) -> Params:
    specs: Any = param_spec(config)
    table = quantized.pack_leaf(params.embed, specs.embed, scheme)
    if params.head is None and config.head == "vocabulary":
        hidden = _embedded(params, config, tokens)
        for spec, layer in zip(config.layers, params.layers, strict=True):
            wide = jax.tree.map(_wide, layer, is_leaf=is_packed)
            hidden = [layer_output(wide, x, spec) for x in hidden]
        table = _quantize_head(params.embed, specs.embed, scheme, recipe, params, config, hidden)
    hidden = _embedded(dataclasses.replace(params, embed=table), config, tokens)
    layers = []
    bar = tqdm.tqdm(config.layers, desc="calibrating layers", disable=not progress)
    for spec, layer, products in zip(bar, params.layers, specs.layers, strict=True):
        packed, wide = _quantize_layer(layer, spec, products, scheme, recipe, hidden)
        hidden = [layer_output(wide, x, spec) for x in hidden]
        layers.append(packed)
    head = params.head
    if head is not None:
        head = _quantize_head(head, specs.head, scheme, recipe, params, config, hidden)
    return dataclasses.replace(params, embed=table, layers=tuple(layers), head=head)


def _embedded(params: Params, config: ModelConfig, tokens: Array) -> list[Float[Array, "1 S D"]]:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return [_wide(embed(params, config, row[None], positions)) for row in tokens]


def _quantize_head(
    weight: Any,
    product: ArraySpec,
    scheme: Scheme,
    recipe: Recipe,
    params: Params,
    config: ModelConfig,
    hidden: Sequence[Array],
) -> PackedLeaf:
    """Pack a table [V, D] for the residuals that reach the head."""
    rows = jnp.concatenate([_head_input(params, config, x) for x in hidden])
    matrix = as_matrix(_wide(weight), product.num_in_axes)
    return _leaf(recipe.pack(matrix, statistics_of(rows), scheme), product, scheme)


def _quantize_layer(
    layer: LayerParams,
    spec: LayerSpec,
    products: LayerParams,
    scheme: Scheme,
    recipe: Recipe,
    hidden: Sequence[Array],
) -> tuple[LayerParams, LayerParams]:
    """Return a layer with packed weights, and the same with their values in float32."""
    wide = jax.tree.map(_wide, layer, is_leaf=is_packed)

    def statistics(layer: LayerParams, path: Path) -> InputStatistics:
        return collect(layer, spec, hidden, path, at(products, path))

    if recipe.rescale is not None:
        wide = recipe.rescale(wide, spec, products, scheme, statistics)
    # Norms and biases go back to the dtypes that they had.
    rest = jax.tree.map(_like, wide, layer, is_leaf=is_packed)
    for path in product_paths(products):
        product = at(products, path)
        matrix, seen = matrix_at(wide, products, path), statistics(wide, path)
        leaf = _leaf(_pack(recipe, matrix, seen, scheme), product, scheme)
        rest, wide = put(rest, path, leaf), put(wide, path, widen(leaf))
    return rest, wide


def _pack(
    recipe: Recipe,
    matrix: Float[Array, "*stack K N"],
    statistics: InputStatistics,
    scheme: Scheme,
) -> PackedWeight:
    """Pack a matrix, or those of a stack one after the other, which bounds the memory."""
    if matrix.ndim == 2:
        return recipe.pack(matrix, statistics, scheme)
    return jax.lax.map(lambda pair: recipe.pack(*pair, scheme), (matrix, statistics))


def _leaf(matrix: PackedWeight, product: ArraySpec, scheme: Scheme) -> PackedLeaf:
    return PackedLeaf(
        matrix=matrix,
        shape=product.shape,
        num_in_axes=product.num_in_axes,
        num_batch_axes=product.num_batch_axes,
        activations=scheme.activations,
    )


def _head_input(
    params: Params, config: ModelConfig, hidden: Float[Array, "1 S D"]
) -> Float[Array, "S E"]:
    """Return the rows that the head multiplies."""
    if params.final_norm is not None and config.final_norm is not None:
        hidden = normalize(hidden, params.final_norm, config.final_norm)
    return project_out(params, hidden)[0]


def _wide(leaf: Any) -> Any:
    """Return a weight in float32."""
    return widen(leaf) if is_packed(leaf) else leaf.astype(jnp.float32)


def _like(wide: Array, leaf: Any) -> Array:
    return wide if is_packed(leaf) else wide.astype(leaf.dtype)
