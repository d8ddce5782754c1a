"""How the model meets the caller's mesh: which axes cut what, and Auto axes inside.

`Rules` say which mesh axis cuts which logical axis of the weights; `cut_axes` applies them.

The layers are written for Auto axes, where XLA chooses how intermediate values are sharded. A mesh
may have Explicit axes instead (`jax.make_mesh` makes those), in which every operation must say how
its result is sharded. `automatic` turns them into Auto inside a function, and back for its results.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, auto_axes

from inferjax.errors import ShardingError
from inferjax.rules import DEFAULT_RULES, Rules

__all__ = ["DEFAULT_RULES", "Rules", "automatic", "check_names", "cut_axes", "rows_like"]


def check_names(sizes: Mapping[str, int], rules: Rules) -> None:
    """Refuse a mesh with an axis that the rules do not name: its devices would all do the same.

    Raises: ShardingError.
    """
    unknown = [name for name, size in sizes.items() if size > 1 and name not in rules.names]
    if unknown:
        raise ShardingError(
            f"mesh axis {unknown[0]!r} of {sizes[unknown[0]]} devices cuts nothing",
            why=f"the rules name {', '.join(map(repr, rules.names))}, the mesh has "
            f"{', '.join(f'{name!r} ({size})' for name, size in sizes.items())}",
            fix="rename the axis, or pass rules that say what it cuts",
            axis=unknown[0],
        )


def cut_axes(
    rules: Rules,
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    may_cut: Callable[[int, int], bool] = lambda *_: True,
) -> tuple[str | None, ...]:
    """Return the mesh axis that cuts each axis of a weight with these logical names, or None.

    `may_cut(axis, size)` can refuse more than what does not divide.
    """
    table, cut = dict(rules.axes), []
    for axis, (name, count) in enumerate(zip(names, shape, strict=True)):
        wanted = table.get(name) if name is not None else None
        size = sizes.get(wanted, 1) if wanted is not None else 1
        fits = size > 1 and wanted not in cut and count % size == 0 and may_cut(axis, size)
        cut.append(wanted if fits else None)
    return tuple(cut)


def automatic[**P, R](outputs: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function with Auto axes; where there are no Explicit ones it is called as it is.

    `outputs` is called with the positional arguments and returns a tree prefix of the results: a
    `PartitionSpec`, or arrays whose sharding the results take.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **static: P.kwargs) -> R:
            mesh = _explicit_mesh(args)
            if mesh is None:
                return function(*args, **static)
            wanted = jax.tree.map(lambda x: _sharding_like(x, mesh), outputs(*args))
            convert: Any = auto_axes(axes=mesh.explicit_axes, out_sharding=wanted)
            return convert(lambda *arrays: function(*arrays, **static))(*args)

        return wrapped

    return decorate


def rows_like(array: Any) -> PartitionSpec:
    """Return the spec of results whose rows are sharded as those of `array`, and nothing else."""
    return PartitionSpec(*jax.typeof(array).sharding.spec[:1])


def _explicit_mesh(args: Any) -> AbstractMesh | None:
    """Return the mesh of the first argument that lives on one with Explicit axes."""
    for leaf in jax.tree.leaves(args):
        mesh = jax.typeof(leaf).sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _sharding_like(array: Any, mesh: AbstractMesh) -> NamedSharding:
    known = isinstance(array, PartitionSpec)
    return NamedSharding(mesh, array if known else jax.typeof(array).sharding.spec)
