"""The one way to make a pytree: a frozen, keyword-only dataclass whose fields are leaves."""

import dataclasses
from typing import Any, dataclass_transform

import flax.struct


def static(**kwargs: Any) -> Any:
    """Mark a field as part of the tree's structure (hashable, never traced)."""
    return dataclasses.field(metadata={"pytree_node": False}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def pytree[T](cls: type[T]) -> type[T]:
    """Register `cls` as a pytree.

    jaxtyping's import hook would check shapes on every unflatten, where leaves may be None, specs
    or batched tracers; `__no_type_check__` exempts the class and leaves function checks on.
    """
    cls.__no_type_check__ = True  # type: ignore[attr-defined]
    return flax.struct.dataclass(cls, kw_only=True)
