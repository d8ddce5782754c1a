"""Between a model's weights and the tensors that Hugging Face keeps them in, without files.

Every leaf of `Params` rearranges tensors (see `sources`): a linear map that moves values.
Its transpose moves them back, so that no family writes down the way out beside the way in. Both
directions work on arrays that live on devices, and inside `jit` and `grad`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array

from inferjax.config import ModelConfig
from inferjax.errors import ShapeError
from inferjax.models.family import model_sources
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import check_arrays
from inferjax.models.registry import family_named
from inferjax.models.sources import Source
from inferjax.params import Params


def params_from_tensors(config: ModelConfig, tensors: Mapping[str, Array]) -> Params:
    """Return the weights made of tensors under Hugging Face's full names and in its layout.

    Leaves keep the tensors' dtype, except those that are never rounded. Tensors that the model does
    not use are ignored.

    Raises: ShapeError naming a tensor that is missing or of another shape.
    """
    specs, treedef = jax.tree.flatten(param_spec(config), is_leaf=_is_spec)
    leaves = []
    for spec, source in zip(specs, _sources(config, treedef), strict=True):
        leaf = source.build(*(_tensor(tensors, t.name, t.shape) for t in source.tensors))
        leaves.append(leaf if spec.dtype is None else leaf.astype(spec.dtype))
    return jax.tree.unflatten(treedef, leaves)


def tensors_from_params(config: ModelConfig, params: Params) -> dict[str, Array]:
    """Return the tensors that `params_from_tensors` makes the same weights of.

    Values that the model never reads are zero.

    Raises: UnsupportedConfig for packed weights.
    """
    return dict(iterate_tensors(config, params))


def iterate_tensors(config: ModelConfig, params: Params) -> Iterator[tuple[str, Array]]:
    """Yield the tensors one after the other, so that few of them exist at a time.

    Raises: UnsupportedConfig for packed weights.
    """
    check_arrays(params)
    treedef = jax.tree.structure(param_spec(config), is_leaf=_is_spec)
    sources = _sources(config, treedef)
    remaining = Counter(tensor.name for source in sources for tensor in source.tensors)
    # A tensor that several leaves take parts of is whole when the last of them has given its part.
    partial: dict[str, Array] = {}
    for source, leaf in zip(sources, treedef.flatten_up_to(params), strict=True):
        for tensor, values in zip(source.tensors, _unbuild(source, leaf), strict=True):
            name = tensor.name
            whole = partial.pop(name) + values if name in partial else values
            remaining[name] -= 1
            if remaining[name]:
                partial[name] = whole
            else:
                yield name, whole


def _sources(config: ModelConfig, treedef: Any) -> list[Source]:
    return treedef.flatten_up_to(model_sources(family_named(config.family), config))


def _unbuild(source: Source, leaf: Array) -> tuple[Array, ...]:
    """Return the tensors that the leaf was built of."""
    shapes = [jax.ShapeDtypeStruct(tensor.shape, leaf.dtype) for tensor in source.tensors]
    return jax.linear_transpose(source.build, *shapes)(leaf)


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        raise ShapeError(
            f"tensor {name!r} is {'missing' if found is None else tuple(found.shape)}",
            why=f"the config calls for {shape}",
            fix="give Hugging Face's full names and layout, of a model with this config",
        )
    return found


def _is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)
