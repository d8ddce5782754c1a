"""A model's weights in fewer bits: which of them, and how each is stored."""

from typing import Any

import jax
from jaxtyping import Array

from inferjax.config import ModelConfig
from inferjax.models.params import ArraySpec, check_params, param_spec
from inferjax.params import Params
from inferjax.quant.leaf import PackedLeaf, as_matrix, is_packed, widen
from inferjax.quant.schemes import Scheme, round_to_nearest, scheme_named


def quantize(params: Params, config: ModelConfig, scheme: str) -> Params:
    """Store the weights of the dense products by a scheme of the table, rounding to nearest.

    Norms, biases, routers, experts and the small products inside latent attention stay arrays.
    Pure: works under `jit` and on abstract arrays. Leaves that are packed already are packed anew.

    Raises: UnsupportedConfig for an unknown scheme, ShapeError for weights of another model.
    """
    how = scheme_named(scheme)
    check_params(params, config)
    return jax.tree.map(
        lambda spec, leaf: pack_leaf(leaf, spec, how) if spec.num_in_axes else leaf,
        param_spec(config),
        params,
        is_leaf=lambda node: isinstance(node, ArraySpec),
    )


def pack_leaf(weight: Any, spec: ArraySpec, scheme: Scheme) -> PackedLeaf:
    """Return one weight packed; NumPy arrays stay NumPy's."""
    values = widen(weight) if is_packed(weight) else weight
    matrix = round_to_nearest(as_matrix(values, spec.num_in_axes), scheme)
    return PackedLeaf(
        matrix=matrix,
        shape=spec.shape,
        num_in_axes=spec.num_in_axes,
        activations=scheme.activations,
    )


def dequantize(params: Params) -> Params:
    """Return all weights as arrays, packed ones in float32."""

    def widened(leaf: Any) -> Array:
        return widen(leaf) if is_packed(leaf) else leaf

    return jax.tree.map(widened, params, is_leaf=is_packed)
