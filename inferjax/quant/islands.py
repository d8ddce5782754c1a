"""Products with packed weights on a mesh: each device runs its own part, inside `shard_map`.

XLA cannot cut a foreign call, and would gather the weights for it. Nor need it know their layout.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from inferjax.quant.leaf import PackedLeaf, kept_axes, stacked_axes, summed_axes
from inferjax.quant.split import local_leaf, mesh_of, on_each_device, rows_of, specs_of


def product_on_mesh(
    run: Callable[[Array, PackedLeaf], Array], x: Float[Array, "..."], leaf: PackedLeaf
) -> Float[Array, "..."]:
    """Run a product of `[*kept, *stack, *summed]` with a leaf whose split has a mesh.

    Where the weight's columns or stack are cut nothing is exchanged; where its rows are, one sum
    over devices is.
    """
    mesh, split = mesh_of(leaf), leaf.split
    if mesh is None or split is None:
        return run(x, leaf)
    sizes = dict(mesh.shape)
    names = {axis: name for axis, name in enumerate(split.axes)}
    stack = [names[axis] for axis in stacked_axes(leaf)]
    summed = [names[axis] for axis in summed_axes(leaf)]
    num_kept = x.ndim - len(stack) - len(summed)
    lead = [rows_of(split.rows, x.shape[0], sizes), *[None] * num_kept][:num_kept]
    over = tuple(name for name in summed if name is not None)
    # Rows in another order than the inputs' pick their own from all of them.
    of_x = summed if leaf.permutation is None else [None] * len(summed)

    def local(x: Array, leaf: PackedLeaf) -> Array:
        out = run(x, local_leaf(leaf, sizes))
        return lax.psum(out, over) if over else out

    return on_each_device(
        local,
        mesh,
        in_specs=(PartitionSpec(*lead, *stack, *of_x), specs_of(leaf)),
        out_specs=PartitionSpec(*lead, *stack, *(names[axis] for axis in kept_axes(leaf))),
    )(x, leaf)


def lookup_on_mesh(
    run: Callable[[PackedLeaf, Array], Array], table: PackedLeaf, ids: Int[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """Read rows of an embedding `[V, D]`: each device reads those it holds, and they are summed."""
    mesh, split = mesh_of(table), table.split
    if mesh is None or split is None:
        return run(table, ids)
    sizes = dict(mesh.shape)
    across, width = split.axes
    rows = rows_of(split.rows, ids.shape[0], sizes) if ids.ndim else None

    def local(table: PackedLeaf, ids: Array) -> Array:
        part = local_leaf(table, sizes)
        if across is None:
            return run(part, ids)
        held = part.shape[0]
        at = ids.clip(0, held * sizes[across] - 1) - lax.axis_index(across) * held
        found = run(part, at.clip(0, held - 1))
        is_held = (at >= 0) & (at < held)
        return lax.psum(jnp.where(is_held[..., None], found, 0), across)

    lead = [rows, *[None] * ids.ndim][: ids.ndim]
    return on_each_device(
        local,
        mesh,
        in_specs=(specs_of(table), PartitionSpec(*lead)),
        out_specs=PartitionSpec(*lead, width),
    )(table, ids)
