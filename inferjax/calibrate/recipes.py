"""The ways to choose a weight's codes, by name."""

import dataclasses
from collections.abc import Callable

from inferjax.calibrate import awq, gptq
from inferjax.calibrate.products import Path
from inferjax.config import LayerSpec
from inferjax.errors import UnsupportedConfig
from inferjax.params import LayerParams
from inferjax.quant.schemes import Scheme
from inferjax.quant.watched import InputStatistics
from pallas_kernels.quant_matmul import PackedWeight

Pack = Callable[..., PackedWeight]
Collect = Callable[[LayerParams, Path], InputStatistics]
Rescale = Callable[[LayerParams, LayerSpec, LayerParams, Scheme, Collect], LayerParams]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one product is packed, from its matrix, its inputs' statistics and the scheme.

    `rescale` changes a whole layer beforehand without changing what it computes.
    """

    pack: Pack
    rescale: Rescale | None = None


# None rounds to nearest and looks at no activations.
RECIPES: dict[str, Recipe | None] = {
    "rtn": None,
    "awq": Recipe(pack=awq.pack, rescale=awq.rescale),
    "gptq": Recipe(pack=gptq.pack),
}


def recipe_named(name: object) -> Recipe | None:
    """Return a recipe of the table.

    Raises: UnsupportedConfig listing the known ones.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise UnsupportedConfig(
            f"recipe={str(name)[:40]!r}",
            why="there is no such recipe",
            fix=f"use one of {', '.join(RECIPES)}",
        )
    return RECIPES[name]
