"""A model's weights in fewer bits: which of them, and how each is stored."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr
from jaxtyping import Array

from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedConfig
from inferjax.models.params import ArraySpec, check_params, param_spec
from inferjax.params import Params
from inferjax.quant.fake import rounded_straight_through
from inferjax.quant.leaf import PackedLeaf, as_matrix, is_packed, widen
from inferjax.quant.schemes import Scheme, round_to_nearest, scheme_named
from pallas_kernels.quant_matmul import QUANTIZED, PackedWeight, pack, pack_codes


def quantize(params: Params, config: ModelConfig, scheme: str) -> Params:
    """Store the weights of all large products by a scheme of the table, rounding to nearest.

    Norms, biases, routers and the gates of shared experts stay arrays.
    Pure: works under `jit` and on abstract arrays. Leaves that are packed already are packed anew.
    Under `jit` a group that the scheme's scales cannot hold becomes NaN.

    Raises: UnsupportedConfig for an unknown scheme, or for values that its scales cannot hold;
      ShapeError for weights of another model.
    """
    how = scheme_named(scheme)
    check_params(params, config)
    packed = jax.tree.map(
        lambda spec, leaf: pack_leaf(leaf, spec, how) if spec.num_in_axes else leaf,
        param_spec(config),
        params,
        is_leaf=lambda node: isinstance(node, ArraySpec),
    )
    check_scales(packed, params)
    return packed


def pack_leaf(weight: Any, spec: ArraySpec, scheme: Scheme) -> PackedLeaf:
    """Return one weight packed; NumPy arrays stay NumPy's."""
    values = widen(weight) if is_packed(weight) else weight
    matrix = round_to_nearest(as_matrix(values, spec.num_in_axes, spec.num_batch_axes), scheme)
    return PackedLeaf(
        matrix=matrix,
        shape=spec.shape,
        num_in_axes=spec.num_in_axes,
        num_batch_axes=spec.num_batch_axes,
        activations=scheme.activations,
    )


def check_scales(packed: Params, params: Params) -> None:
    """Refuse weights, of `params`, that came out with scales that are not finite.

    Raises: UnsupportedConfig naming the first.
    """
    paths, treedef = jax.tree.flatten_with_path(packed, is_leaf=is_packed)
    for (path, leaf), weight in zip(paths, treedef.flatten_up_to(params), strict=True):
        if is_packed(leaf):
            check_matrix_scales(leaf.matrix, weight, f"params{keystr(path)}")


def check_matrix_scales(matrix: PackedWeight, weight: Any, what: str) -> None:
    """Refuse a matrix with a scale that is not finite although the weight, called `what`, is.

    A weight that is not finite itself stays NaN. Nothing is known of values that are traced.

    Raises: UnsupportedConfig.
    """
    scales = matrix.scales
    if scales is None or isinstance(scales, Tracer) or _all_finite(scales):
        return
    values = widen(weight) if is_packed(weight) else weight
    if not _all_finite(values):
        return
    dtype = np.dtype(scales.dtype)
    raise UnsupportedConfig(
        f"{what} has values up to {float(abs(values).max()):g}, too large for {matrix.format}",
        why=f"its scales and minimums are {dtype.name}, which ends at {np.finfo(dtype).max:g}",
        fix="use int8 or bfloat16",
    )


def _all_finite(array: Any) -> bool:
    return bool(array.__array_namespace__().isfinite(array).all())


def fake_quantize(params: Params, config: ModelConfig, scheme: str) -> Params:
    """Return the weights as arrays with the values that `quantize` gives them, for training.

    Gradients pass to the weights as if they had not been rounded, except where they are clipped.
    Rounded activations ("int8-w8a8") are not imitated.

    Raises: UnsupportedConfig for an unknown scheme or weights that are packed already, ShapeError
      for weights of another model.
    """
    how = scheme_named(scheme)
    check_params(params, config)
    check_arrays(params)

    def rounded(spec: ArraySpec, leaf: Any) -> Array:
        if not spec.num_in_axes:
            return leaf
        matrix = as_matrix(leaf, spec.num_in_axes, spec.num_batch_axes)
        matrix = rounded_straight_through(matrix, how)
        return (matrix.T if spec.num_in_axes < 0 else matrix).reshape(spec.shape)

    return jax.tree.map(
        rounded, param_spec(config), params, is_leaf=lambda node: isinstance(node, ArraySpec)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """What a packed leaf is beside its weight's shape: all that is known before its values are.

    `scale_dtype` is that of scales and minimums; `permuted` leaves have a permutation.
    """

    format: str
    group: int = 0
    minimum: bool = False
    scale_dtype: str = "float32"
    activations: str = "float32"
    permuted: bool = False


def form_by(scheme: Scheme) -> PackedForm:
    """Return what leaves packed by a scheme are."""
    return PackedForm(
        format=scheme.format,
        group=scheme.group,
        minimum=scheme.minimum,
        scale_dtype=scheme.scale_dtype,
        activations=scheme.activations,
    )


def form_of(leaf: PackedLeaf) -> PackedForm:
    """Return what `abstract_leaf` makes such a leaf of."""
    matrix = leaf.matrix
    return PackedForm(
        format=matrix.format,
        group=matrix.group,
        minimum=matrix.minimums is not None,
        scale_dtype="float32" if matrix.scales is None else matrix.scales.dtype.name,
        activations=leaf.activations,
        permuted=leaf.permutation is not None,
    )


@functools.cache
def abstract_leaf(spec: ArraySpec, form: PackedForm) -> PackedLeaf:
    """Return a packed weight whose arrays are `jax.ShapeDtypeStruct`.

    Raises: ValueError for a format or group that no kernel takes.
    """

    def packed() -> PackedWeight:
        weight = as_matrix(
            jnp.zeros(spec.shape, jnp.float32), spec.num_in_axes, spec.num_batch_axes
        )
        if form.format not in QUANTIZED:
            return pack(weight, form.format)
        *stack, num_in, num_out = weight.shape
        groups = -(-num_in // form.group) if form.group else 1
        shared = jnp.zeros((*stack, groups, num_out), form.scale_dtype)
        return pack_codes(
            weight, shared, shared if form.minimum else None, format=form.format, group=form.group
        )

    matrix = jax.eval_shape(packed)
    stack = spec.shape[: spec.num_batch_axes]
    order = jax.ShapeDtypeStruct((*stack, matrix.num_in), jnp.int32) if form.permuted else None
    return PackedLeaf(
        matrix=matrix,
        permutation=order,
        shape=spec.shape,
        num_in_axes=spec.num_in_axes,
        num_batch_axes=spec.num_batch_axes,
        activations=form.activations,
    )


def packed_formats(params: Params) -> list[str]:
    """Return the formats of packed weights, the one of most weights first."""
    leaves = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(leaf)]
    return [name for name, _ in Counter(leaf.matrix.format for leaf in leaves).most_common()]


def check_arrays(params: Params) -> None:
    """Refuse packed weights where only arrays have a meaning.

    Raises: UnsupportedConfig naming the first.
    """
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_packed):
        if is_packed(leaf):
            raise UnsupportedConfig(
                f"params{keystr(path)} is packed as {leaf.matrix.format}",
                why="codes take no gradient, and Hugging Face's files have no place for them",
                fix="load with quantize='none', or use dequantize(params), which are float32",
            )


def dequantize(params: Params) -> Params:
    """Return all weights as arrays, packed ones in float32."""

    def widened(leaf: Any) -> Array:
        return widen(leaf) if is_packed(leaf) else leaf

    return jax.tree.map(widened, params, is_leaf=is_packed)
