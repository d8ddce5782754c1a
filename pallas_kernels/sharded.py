"""Whether XLA may cut an array over devices: it cannot cut a foreign call, and would gather."""

import jax
from jax.sharding import AxisType
from jaxtyping import Array


def is_sharded(x: Array) -> bool:
    """Return whether an array is on a mesh; inside `shard_map` the caller has cut it already."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}
