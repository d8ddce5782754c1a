"""Small moves between shapes, written out where broadcasting would be implicit."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def align_last(values: Shaped[Array, "*axes"], ndim: int) -> Shaped[Array, "*more"]:
    """Put size-1 axes in front until there are `ndim`, to broadcast against trailing axes."""
    return jnp.expand_dims(values, tuple(range(ndim - values.ndim)))
