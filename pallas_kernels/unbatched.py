"""Scalars that stay scalars under `vmap`, so that `cond` and `while_loop` stay real branches.

A batched predicate turns `lax.cond` into a select that computes both sides (of a whole KV cache,
in the worst case) and keeps a `while_loop` running by selecting its carry. These reductions also
reduce over every enclosing `vmap` axis: the branch is then taken when any mapped instance needs it,
which is always correct for work that is a no-op for the rows that do not.
"""

import jax.numpy as jnp
from jax import custom_batching
from jaxtyping import Array, Bool, Int


@custom_batching.custom_vmap
def any_row(flags: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Return whether any flag is set, in any instance of an enclosing `vmap`."""
    return jnp.any(flags)


@any_row.def_vmap
def _any_row_rule(axis_size: int, in_batched: list[bool], flags: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return any_row(flags), False


@custom_batching.custom_vmap
def max_row(values: Int[Array, "..."]) -> Int[Array, ""]:
    """Return the largest value, over every instance of an enclosing `vmap`."""
    return jnp.max(values)


@max_row.def_vmap
def _max_row_rule(axis_size: int, in_batched: list[bool], values: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return max_row(values), False


@custom_batching.custom_vmap
def max_each(values: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return values as they are; under `vmap`, the largest of all instances for each place."""
    return values


@max_each.def_vmap
def _max_each_rule(axis_size: int, in_batched: list[bool], values: Array) -> tuple[Array, bool]:
    del axis_size
    return max_each(values.max(0) if in_batched[0] else values), False


def min_row(values: Int[Array, "..."]) -> Int[Array, ""]:
    """Return the smallest value, over every instance of an enclosing `vmap`."""
    return -max_row(-values)


__all__ = ["any_row", "max_each", "max_row", "min_row"]
