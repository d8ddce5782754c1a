"""The products of a layer, by where their weights are, and statistics of what enters them."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from inferjax.config import LayerSpec
from inferjax.layers.context import Dense
from inferjax.layers.rope import rotation
from inferjax.models.decoder import run_layer
from inferjax.models.params import ArraySpec
from inferjax.params import LayerParams
from inferjax.quant.leaf import as_matrix
from inferjax.quant.watched import InputStatistics, Watched, no_statistics

# Where a weight is within a layer: the names of fields, from the outside.
Path = tuple[str, ...]

# In the order in which a layer runs them, so that each sees what those before it have become.
_ORDER = ("wq_a", "wq", "wkv_a", "wqkv", "wk_b", "wv_b", "wo", "w_in", "w_down")


def product_paths(specs: Any) -> tuple[Path, ...]:
    """Return where the weights are that may be packed, in the order of their use."""
    leaves = jax.tree_util.tree_leaves_with_path(
        specs, is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    paths = [tuple(key.name for key in path) for path, spec in leaves if spec.num_in_axes]
    return tuple(sorted(paths, key=lambda path: (path[0], _ORDER.index(path[-1]), path)))


def at(layer: Any, path: Path) -> Any:
    """Return what is at a place of a layer."""
    return functools.reduce(getattr, path, layer)


def put[T](layer: T, path: Path, leaf: Any) -> T:
    """Return the layer with something else in a place."""
    name, *rest = path
    inner = put(getattr(layer, name), tuple(rest), leaf) if rest else leaf
    return layer.replace(**{name: inner})  # type: ignore[attr-defined]


def matrix_at(layer: LayerParams, products: LayerParams, path: Path) -> Float[Array, "*stack K N"]:
    """Return a weight as the matrix of its product, or as a stack of them."""
    product = at(products, path)
    return as_matrix(at(layer, path), product.num_in_axes, product.num_batch_axes)


def collect(
    layer: LayerParams, spec: LayerSpec, hidden: Iterable[Array], path: Path, product: ArraySpec
) -> InputStatistics:
    """Sum statistics of one product's inputs over the residuals that enter the layer."""
    parts = (input_statistics(layer, x, spec, path, product) for x in hidden)
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)


@functools.partial(jax.jit, static_argnames=("spec", "path", "product"))
def input_statistics(
    layer: LayerParams, x: Float[Array, "B S D"], spec: LayerSpec, path: Path, product: ArraySpec
) -> InputStatistics:
    """Return the statistics of one product's inputs: those that its seat's cotangent brings out."""
    num_in, num_batch = product.num_in_axes, product.num_batch_axes

    def total(seat: InputStatistics) -> Array:
        leaf = Watched(
            weight=at(layer, path), seat=seat, num_in_axes=num_in, num_batch_axes=num_batch
        )
        return layer_output(put(layer, path, leaf), x, spec).sum()

    return jax.grad(total)(no_statistics(product.shape, num_in, num_batch))


@functools.partial(jax.jit, static_argnames="spec")
def layer_output(
    layer: LayerParams, x: Float[Array, "B S D"], spec: LayerSpec
) -> Float[Array, "B S D"]:
    """Run one layer on whole sequences."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    rope = spec.attention.rope
    turn = None if rope is None else rotation(positions, rope)
    context = Dense(positions=positions)
    y, _ = run_layer(x, layer, context, jnp.int32(0), turn, spec=spec, moe_tile=None)
    return y
