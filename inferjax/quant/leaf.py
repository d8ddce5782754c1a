"""A weight that is packed for its product: the leaf that stands in `Params` for an array."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from inferjax.pytree import pytree, static
from pallas_kernels.quant_matmul import PackedWeight, dequantize

AnyArray = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a mesh shares out a product: the mesh axis that cuts each axis of the weight, or None.

    `rows` are the mesh axes that cut the rows of the other factor, where they divide them.
    """

    axes: tuple[str | None, ...]
    rows: tuple[str, ...] = ()


@pytree
class PackedLeaf:
    """A packed matrix and the weight it stands for, of `shape`.

    The first `num_in_axes` axes of the weight are the matrix's rows; -1 means that the last axis
    is, as in an embedding `[V, D]`, which is read by rows and contracted over D. With
    `num_batch_axes`, that many axes come before those, of experts or heads: the matrix is a stack.
    `activations` is what the other factor is rounded to.

    `permutation` says which input each row of the matrix multiplies, where rows that share a scale
    are no neighbours (GPTQ's act-order); None is their own order. The other factor is gathered by
    it, so a mesh that shards the summed axis gathers that factor on every device first.

    `split` is set on a mesh. Then columns may have an axis more: see `merge_parts`.
    """

    matrix: PackedWeight
    permutation: Int[AnyArray, "*stack in"] | None = None
    shape: tuple[int, ...] = static()
    num_in_axes: int = static()
    num_batch_axes: int = static(default=0)
    activations: str = static(default="float32")
    split: Split | None = static(default=None)

    @property
    def ndim(self) -> int:
        """The number of the weight's axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """What a product with the weight is computed in, and its result."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads, scales included."""
        matrix = self.matrix
        arrays = (matrix.values, matrix.scales, matrix.minimums, self.permutation)
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays if a is not None)


def as_matrix(
    weight: Shaped[AnyArray, "..."], num_in_axes: int, num_batch_axes: int = 0
) -> Shaped[AnyArray, "*stack K N"]:
    """Return a weight as the matrix that multiplies rows (its transpose for -1), or as a stack."""
    if num_in_axes < 0:
        return weight.reshape(-1, weight.shape[-1]).T
    stack, rest = weight.shape[:num_batch_axes], weight.shape[num_batch_axes:]
    num_in, num_out = math.prod(rest[:num_in_axes]), math.prod(rest[num_in_axes:])
    return weight.reshape(*([math.prod(stack)] if stack else []), num_in, num_out)


def stacked_axes(leaf: PackedLeaf) -> range:
    """Return the weight's axes that count matrices."""
    return range(leaf.num_batch_axes)


def summed_axes(leaf: PackedLeaf) -> range:
    """Return the weight's axes that are a matrix's rows."""
    if leaf.num_in_axes < 0:
        return range(leaf.ndim - 1, leaf.ndim)
    return range(leaf.num_batch_axes, leaf.num_batch_axes + leaf.num_in_axes)


def kept_axes(leaf: PackedLeaf) -> range:
    """Return the weight's axes that are a matrix's columns."""
    if leaf.num_in_axes < 0:
        return range(leaf.ndim - 1)
    return range(leaf.num_batch_axes + leaf.num_in_axes, leaf.ndim)


def num_parts(leaf: PackedLeaf) -> int:
    """Return how many times the columns that are cut repeat: 2 for gate and up."""
    names = leaf.split.axes if leaf.split else ()
    cut = [axis for axis in kept_axes(leaf) if names and names[axis] is not None]
    return math.prod(leaf.shape[axis] for axis in kept_axes(leaf) if cut and axis < cut[0])


def merge_parts(leaf: PackedLeaf) -> PackedWeight:
    """Return the leaf's matrix with all its columns on one axis, as a product takes it.

    Columns that are cut apart repeat on an axis of their own: gate and up of `w_in [D, 2, F]` are
    both cut along F, so values are `[2, F/16, ...]` instead of `[2F/16, ...]`.
    """
    parts, matrix = num_parts(leaf), leaf.matrix
    if parts == 1:
        return matrix
    lead = min(leaf.num_batch_axes, 1)

    def merge(array: Any) -> Any:
        stack, blocks, rest = array.shape[:lead], array.shape[lead + 1], array.shape[lead + 2 :]
        return array.reshape(*stack, parts * blocks, *rest)

    return dataclasses.replace(jax.tree.map(merge, matrix), num_out=parts * matrix.num_out)


def widen(leaf: PackedLeaf) -> Float[AnyArray, "..."]:
    """Return the weight in float32, as the packed codes have it."""
    matrix = unpermute(dequantize(merge_parts(leaf)), leaf, axis=-2)
    return (matrix.T if leaf.num_in_axes < 0 else matrix).reshape(leaf.shape)


def unpermute(
    values: Float[AnyArray, "..."], leaf: PackedLeaf, *, axis: int
) -> Float[AnyArray, "..."]:
    """Bring an axis that has the order of the leaf's rows into the order of the inputs."""
    if leaf.permutation is None:
        return values
    xp = values.__array_namespace__()
    order = xp.argsort(leaf.permutation, axis=-1)
    if order.ndim > 1:
        return xp.take_along_axis(values, order[..., None], axis=axis)
    return xp.take(values, order, axis=axis)


def is_packed(node: object) -> bool:
    """Tell whether a node of a tree is a packed leaf."""
    return isinstance(node, PackedLeaf)


def size_of(leaf: Any) -> int:
    """Return the bytes of an array or of a packed leaf."""
    return (
        leaf.nbytes if is_packed(leaf) else math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    )
