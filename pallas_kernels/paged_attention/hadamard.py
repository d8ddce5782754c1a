"""A fixed turn of queries and keys before keys are rounded to eight bits.

In trained models some columns of all keys are many times larger than the others, and set a factor
that is too coarse for these. A Hadamard matrix spreads every column over all of them, and as it is
orthonormal, products of queries and keys stay what they were.

Source: QuaRot, arXiv 2404.00456, section 3.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def spread(x: Float[Array, "*axes W"]) -> Float[Array, "*axes W"]:
    """Multiply with a symmetric orthonormal matrix: twice is not at all.

    It is made of blocks of the largest power of two that divides W.
    """
    width = x.shape[-1]
    size = width & -width
    blocks = x.reshape(*x.shape[:-1], width // size, size)
    turn = jnp.asarray(_hadamard(size), x.dtype)
    turned = jnp.einsum("...NW,WV->...NV", blocks, turn, preferred_element_type=jnp.float32)
    return turned.astype(x.dtype).reshape(x.shape)


def with_turned_queries(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention that turns its queries, in float32: they are not rounded once more."""

    def attend(q: Array, *arrays: Any, **static: Any) -> Any:
        found = run(spread(q.astype(jnp.float32)), *arrays, **static)
        if isinstance(found, tuple):  # logarithms of sums stay float32
            return found[0].astype(q.dtype), found[1]
        return found.astype(q.dtype)

    return attend


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)
