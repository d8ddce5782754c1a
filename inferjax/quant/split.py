"""How a mesh shares out a packed weight: along which of its axes, and on which boundaries.

A matrix is cut between blocks of sixteen columns, and between rows where groups, words and, for
rounded activations, chunks end: every device then holds a smaller packed matrix of its own.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array

from inferjax.quant.leaf import (
    PackedLeaf,
    Split,
    kept_axes,
    merge_parts,
    num_parts,
    stacked_axes,
    summed_axes,
)
from pallas_kernels.quant_matmul.packed import LANES, MAX_GROUP, VALUES_PER_WORD


def may_cut(leaf: PackedLeaf, axis: int, size: int) -> bool:
    """Tell whether cutting an axis of the weight into `size` parts keeps to packed boundaries."""
    if leaf.shape[axis] % size:
        return False
    if axis in stacked_axes(leaf):
        return leaf.num_batch_axes == 1
    if axis in kept_axes(leaf):
        columns = math.prod(leaf.shape[i] for i in kept_axes(leaf) if i >= axis)
        return (columns // size) % LANES == 0
    if leaf.permutation is not None and leaf.num_in_axes < 0:
        return False  # a lookup needs a whole row to bring it into the order of the inputs
    before = math.prod(leaf.shape[i] for i in summed_axes(leaf) if i < axis)
    group = leaf.matrix.group or (MAX_GROUP if leaf.activations == "int8" else 1)
    step = math.lcm(VALUES_PER_WORD[leaf.matrix.format], group)
    return before == 1 and (leaf.matrix.num_in // size) % step == 0


def lay_out(leaf: PackedLeaf, split: Split | None) -> PackedLeaf:
    """Return the leaf in the layout that a split needs: columns that repeat get an axis in front.

    Gate and up of `w_in [D, 2, F]` are cut along F, each by itself: values are
    `[2, F/16, ...]` then, not `[2F/16, ...]`. Costs nothing under `jit`; the bytes stay in order.
    """
    merged = dataclasses.replace(leaf, matrix=merge_parts(leaf), split=split)
    parts = num_parts(merged)
    if parts == 1:
        return merged
    lead = min(leaf.num_batch_axes, 1)

    def cut(array: Any) -> Any:
        stack, blocks, rest = array.shape[:lead], array.shape[lead], array.shape[lead + 1 :]
        return array.reshape(*stack, parts, blocks // parts, *rest)

    matrix = jax.tree.map(cut, merged.matrix)
    matrix = dataclasses.replace(matrix, num_out=matrix.num_out // parts)
    return dataclasses.replace(merged, matrix=matrix)


def specs_of(leaf: PackedLeaf) -> PackedLeaf:
    """Return the leaf with a `PartitionSpec` in place of every array."""
    names = leaf.split.axes if leaf.split else (None,) * leaf.ndim

    def named(axes: range) -> str | None:
        return next((names[axis] for axis in axes if names[axis] is not None), None)

    lead = [named(stacked_axes(leaf))] if leaf.num_batch_axes else []
    columns = [*lead, *([None] if num_parts(leaf) > 1 else []), named(kept_axes(leaf))]
    rows, matrix = named(summed_axes(leaf)), leaf.matrix
    shared = PartitionSpec(*columns, rows if matrix.group else None)
    matrix = dataclasses.replace(
        matrix,
        values=PartitionSpec(*columns, rows),
        scales=None if matrix.scales is None else shared,
        minimums=None if matrix.minimums is None else shared,
    )
    order = None if leaf.permutation is None else PartitionSpec(*lead, rows)
    return dataclasses.replace(leaf, matrix=matrix, permutation=order)


def local_leaf(leaf: PackedLeaf, sizes: Mapping[str, int]) -> PackedLeaf:
    """Return what one device holds as a leaf of its own, inside `shard_map`."""
    split = leaf.split or Split(axes=(None,) * leaf.ndim)
    cuts = [1 if name is None else sizes[name] for name in split.axes]
    matrix = dataclasses.replace(
        leaf.matrix,
        num_in=leaf.matrix.num_in // math.prod(cuts[axis] for axis in summed_axes(leaf)),
        num_out=leaf.matrix.num_out // math.prod(cuts[axis] for axis in kept_axes(leaf)),
    )
    matrix = merge_parts(dataclasses.replace(leaf, matrix=matrix))
    shape = tuple(count // cut for count, cut in zip(leaf.shape, cuts, strict=True))
    return dataclasses.replace(leaf, matrix=matrix, shape=shape, split=None)


def mesh_of(leaf: Any) -> AbstractMesh | None:
    """Return the mesh that a split leaf lies on; None without a split, or outside of a mesh."""
    if not isinstance(leaf, PackedLeaf) or leaf.split is None:
        return None
    mesh = jax.typeof(leaf.matrix.values).sharding.mesh
    named = {*leaf.split.rows, *(name for name in leaf.split.axes if name is not None)}
    return mesh if named <= set(mesh.axis_names) and not mesh.empty else None


def rows_of(
    names: tuple[str, ...], num_rows: int, sizes: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the mesh axes that cut rows, None where they do not divide so many."""
    return names if num_rows % math.prod(sizes[name] for name in names) == 0 else None


def on_each_device(
    function: Callable[..., Array], mesh: AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Array]:
    """Return `shard_map` of a function whose kernels say nothing of what varies between devices."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
