"""Which leaves of a saved model are packed, and how: what its record says of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath, keystr

from inferjax.checkpoint.planning import Mode
from inferjax.config import ModelConfig
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import (
    PackedForm,
    abstract_leaf,
    check_matrix_scales,
    form_by,
    form_of,
    pack_leaf,
)
from inferjax.params import Params
from inferjax.quant.leaf import is_packed, widen
from pallas_kernels.quant_matmul import ACTIVATIONS

_SCALE_DTYPES = ("float32", "float16")


def packed_forms(params: Params) -> dict[str, dict[str, Any]]:
    """Return how each packed leaf is packed, by its path."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_packed)
    return {
        _name(path): dataclasses.asdict(form_of(leaf)) for path, leaf in leaves if is_packed(leaf)
    }


def dtype_of_arrays(params: Params, config: ModelConfig) -> str:
    """Return the dtype of the weights that are arrays, which all but exempted ones share."""
    specs, treedef = jax.tree.flatten(param_spec(config), is_leaf=_is_spec)
    for spec, leaf in zip(specs, treedef.flatten_up_to(params), strict=True):
        if spec.dtype is None and not is_packed(leaf):
            return leaf.dtype.name
    return "float32"


def abstract_leaves(config: ModelConfig, packed: object) -> Params:
    """Return the weights as `jax.ShapeDtypeStruct`, packed where a record says so.

    Raises: ValueError for a record that describes no leaf of the model.
    """
    if not isinstance(packed, Mapping):
        raise ValueError("the packed leaves are no JSON object")
    specs, treedef = jax.tree.flatten_with_path(param_spec(config), is_leaf=_is_spec)
    known = {_name(path) for path, spec in specs if spec.num_in_axes}
    if unknown := sorted(str(name)[:80] for name in packed if name not in known):
        raise ValueError(f"packed leaves that the config has no place for: {unknown[:8]}")
    leaves = []
    for path, spec in specs:
        name, dtype = _name(path), spec.dtype or config.dtype
        plain = jax.ShapeDtypeStruct(spec.shape, dtype)
        leaves.append(abstract_leaf(spec, _form(packed[name])) if name in packed else plain)
    return jax.tree.unflatten(treedef, leaves)


def leaves_in_mode(saved: Params, config: ModelConfig, mode: Mode) -> Params:
    """Return what `in_mode` makes of saved weights as `jax.ShapeDtypeStruct`."""
    specs, treedef = jax.tree.flatten(param_spec(config), is_leaf=_is_spec)

    def of(spec: ArraySpec, leaf: Any) -> Any:
        if mode == "none":
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or config.dtype)
        if mode == "native" or not spec.num_in_axes:
            return leaf
        return abstract_leaf(spec, form_by(mode))

    leaves = zip(specs, treedef.flatten_up_to(saved), strict=True)
    return jax.tree.unflatten(treedef, [of(*pair) for pair in leaves])


def in_mode(leaf: Any, path: KeyPath, spec: ArraySpec, dtype: str, mode: Mode) -> Any:
    """Return a restored weight: as an array, as it is, or packed by a scheme in host memory.

    Raises: UnsupportedConfig for values that the scheme's scales cannot hold.
    """
    if mode == "native":
        return leaf
    if mode == "none":
        return widen(leaf).astype(spec.dtype or dtype) if is_packed(leaf) else leaf
    if not spec.num_in_axes or _is_already(leaf, mode):
        return leaf
    leaf = jax.tree.map(np.asarray, leaf)
    packed = pack_leaf(leaf, spec, mode)
    check_matrix_scales(packed.matrix, leaf, _name(path))
    return packed


def _is_already(leaf: Any, mode: Any) -> bool:
    """Tell whether rounding again would only lose."""
    return is_packed(leaf) and form_of(leaf) == form_by(mode)


def _form(fields: object) -> PackedForm:
    """Return what a record says of a leaf.

    Raises: ValueError for what cannot be.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("a packed leaf is described by a JSON object")
    kinds = {field.name: field.type for field in dataclasses.fields(PackedForm)}
    if {name: type(value) for name, value in fields.items()} != kinds:
        raise ValueError(f"a packed leaf has the fields {', '.join(kinds)}")
    form = PackedForm(**fields)
    if (
        form.format not in ACTIVATIONS.get(form.activations, ())
        or form.scale_dtype not in _SCALE_DTYPES
    ):
        raise ValueError(f"no leaf is packed like {str(dict(fields))[:200]}")
    return form


def _name(path: KeyPath) -> str:
    return keystr(path, simple=True, separator="/")


def _is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)
