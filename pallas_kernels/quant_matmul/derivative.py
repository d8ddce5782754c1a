"""The derivative that every implementation of a product with packed weights has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
from jaxtyping import Array

from pallas_kernels.quant_matmul.packed import PackedWeight


def differentiable(run: Callable[..., Array], exact: Callable[..., Array]) -> Callable[..., Array]:
    """Give `run(x, weight, *indices)` the derivative of `exact`, which takes the same arguments.

    The product is linear in x; `indices` have no derivative.
    """

    @jax.custom_jvp
    def multiply(x: Array, weight: PackedWeight, *indices: Array) -> Array:
        return run(x, weight, *indices)

    def derivative(primals: tuple, tangents: tuple) -> tuple[Array, Any]:
        (x, weight, *indices), (dx, dweight, *_) = primals, tangents
        terms = []
        if not isinstance(dx, SymbolicZero):
            terms.append(exact(dx, weight, *indices))
        is_zero = [isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(dweight)]
        if not all(is_zero):
            dweight = jax.tree.map(_instantiate, dweight)
            terms.append(jax.jvp(lambda w: exact(x, w, *indices), (weight,), (dweight,))[1])
        out = multiply(x, weight, *indices)
        return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)

    multiply.defjvp(derivative, symbolic_zeros=True)
    return multiply


def _instantiate(tangent: Any) -> Any:
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    if aval.dtype == float0:
        return np.zeros(aval.shape, float0)
    return jnp.zeros(aval.shape, aval.dtype)
