"""How the model meets the caller's mesh.

The layers are written for Auto axes, where XLA chooses how intermediate values are sharded. A mesh
may have Explicit axes instead (`jax.make_mesh` makes those), in which every operation must say how
its result is sharded. `automatic` turns them into Auto inside a function, and back for its results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, auto_axes


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
