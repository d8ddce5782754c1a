"""Attention on a mesh: each device attends with its own heads and its own rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from inferjax.quant.leaf import PackedLeaf
from inferjax.quant.split import mesh_of, on_each_device, rows_of
from inferjax.quant.watched import Watched


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Which axes of a mesh cut key/value heads, query heads of each of them, and rows."""

    mesh: AbstractMesh
    kv: str | None
    query: str | None
    rows: tuple[str, ...]


def heads_of(weight: Array | PackedLeaf | Watched, *, latent: bool = False) -> Heads | None:
    """Return how a packed projection cuts heads on a mesh; None where nothing is known of one.

    Its output's first axes are key/value heads, or, with `latent`, the query heads of the only one.
    """
    mesh = mesh_of(weight)
    if mesh is None or not isinstance(weight, PackedLeaf) or weight.split is None:
        return None
    name = weight.split.axes[0 if latent else 1]
    return Heads(
        mesh=mesh,
        kv=None if latent else name,
        query=name if latent else None,
        rows=weight.split.rows,
    )


def attend_on_mesh(
    run: Callable[..., Array],
    heads: Heads | None,
    q: Float[Array, "B T K G W"],
    pool: Any,
    layer: Int[Array, ""],
    of_rows: tuple[Array, ...],
    of_heads: Any,
) -> Float[Array, "B T K G Hv"]:
    """Run `run(q, pool, layer, of_rows, of_heads)`, where heads are cut on each device by itself.

    The pool's third axis is the key/value heads; arrays `of_rows` begin with rows, `of_heads` with
    both kinds of heads. Nothing is exchanged: a device writes and reads the pages of its own heads.
    """
    if heads is None:
        return run(q, pool, layer, of_rows, of_heads)
    rows = rows_of(heads.rows, q.shape[0], dict(heads.mesh.shape))
    of_q = PartitionSpec(rows, None, heads.kv, heads.query)
    specs = (
        of_q,
        PartitionSpec(None, None, heads.kv),
        PartitionSpec(),
        PartitionSpec(rows),
        PartitionSpec(heads.kv, heads.query),
    )
    island = on_each_device(run, heads.mesh, specs, of_q)
    return island(q, pool, layer, of_rows, of_heads)
