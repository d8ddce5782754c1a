"""Which axis of a mesh cuts what: settings that weights, cache and activations follow alike."""

import dataclasses

from inferjax.errors import UnsupportedConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which mesh axis cuts each logical axis of the weights, and which cut a batch's rows.

    Of a weight's axes the first that divides is cut: experts before their `ffn`. Axes of the mesh
    that have one device, and names that the mesh does not have, cut nothing.

    Raises: UnsupportedConfig where one axis is to cut rows and weights: both meet in each product.
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
        """Refuse rules that no product could follow."""
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


DEFAULT_RULES = Rules()
