"""Which axis of a mesh cuts what: settings that weights, cache and activations follow alike."""

import dataclasses
from typing import Any

from inferjax.errors import UnsupportedConfig

# What an axis of a weight can be; `models/params.py` names each one's.
LOGICAL_AXES = ("vocab", "model", "kv_heads", "heads", "ffn", "experts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which mesh axis cuts each logical axis of the weights, and which cut a batch's rows.

    Of a weight's axes the first that divides is cut: experts before their `ffn`. Axes of the mesh
    that have one device, and names that the mesh does not have, cut nothing.

    Raises: UnsupportedConfig for what names no axis of a weight, and where one axis is to cut rows
      and weights: both meet in each product.
    """

    rows: tuple[str, ...] = ("data",)
    axes: tuple[tuple[str, str], ...] = (
        ("vocab", "model"),
        ("kv_heads", "model"),
        ("heads", "model"),
        ("experts", "model"),
        ("ffn", "model"),
    )

    def __post_init__(self) -> None:
        """Refuse rules that would be ignored, or that no product could follow."""
        _check_kinds(self.rows, self.axes)
        both = sorted({name for _, name in self.axes} & set(self.rows))
        if both:
            raise UnsupportedConfig(
                f"mesh axis {both[0]!r} cuts rows and weights",
                why="a product has both, and an axis of the mesh cuts one thing",
                fix="name another axis for one of them",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every mesh axis that cuts something."""
        return tuple(dict.fromkeys((*self.rows, *(name for _, name in self.axes))))


def _check_kinds(rows: Any, axes: Any) -> None:
    if not isinstance(rows, tuple) or not all(isinstance(name, str) for name in rows):
        raise UnsupportedConfig(f"rows={rows!r:.80}", fix='use a tuple of names: rows=("data",)')
    pairs = axes if isinstance(axes, tuple) else (axes,)
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or pair[0] not in LOGICAL_AXES or not isinstance(pair[1], str):
            raise UnsupportedConfig(
                f"axes has {pair!r:.80}",
                why=f"a rule is (axis of a weight, axis of the mesh), the first one of "
                f"{', '.join(LOGICAL_AXES)}",
                fix='use pairs such as ("ffn", "model")',
            )
    cut = [name for name, _ in pairs]
    if twice := [name for name in cut if cut.count(name) > 1]:
        raise UnsupportedConfig(
            f"axes has more than one rule for {twice[0]!r}",
            fix="give one for each axis of a weight",
        )


DEFAULT_RULES = Rules()
