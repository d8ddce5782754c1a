"""Finds experts in checkpoints that keep all of a layer's in one tensor.

Published checkpoints store every expert's gate, up and down apart. Models that transformers 5 saves
without going back to that layout (`save_original_format=False`) have `gate_up_proj` [E, 2 F, D],
gates before ups, and `down_proj` [E, D, F], and name Mixtral's block and router like everyone's.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from inferjax.checkpoint.tensor_file import TensorEntry

_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<index>\d{1,6})\.(?P<part>\w+)\.weight")
# Which fused tensor holds a part, and which of how many equal runs of an expert's rows it is.
_PARTS = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
}


def renamed(name: str, entries: Mapping[str, TensorEntry]) -> str:
    """Return the name under which a tensor of a block of experts is stored whole."""
    other = name.replace(".block_sparse_moe.", ".mlp.")
    return other if name not in entries and other in entries else name


@dataclasses.dataclass(frozen=True, slots=True)
class FusedPlace:
    """Where in a fused tensor one expert's part is: the `run`-th of `num_runs` in its rows."""

    name: str
    expert: int
    run: int
    num_runs: int

    def begin(self, shape: tuple[int, ...]) -> int:
        """Return the first element of a part of this shape."""
        return (self.expert * self.num_runs + self.run) * math.prod(shape)

    def whole_shape(self, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return the shape of a tensor whose parts have this one."""
        rows, *rest = shape
        return (num_experts, self.num_runs * rows, *rest)


def find_fused(name: str, entries: Mapping[str, TensorEntry]) -> FusedPlace | None:
    """Return where the expert's tensor `name` is; None unless it is in a fused one."""
    found = _EXPERT.fullmatch(name)
    if name in entries or found is None or found["part"] not in _PARTS:
        return None
    fused, run, num_runs = _PARTS[found["part"]]
    whole = renamed(f"{found['block']}.experts.{fused}", entries)
    return FusedPlace(whole, int(found["index"]), run, num_runs) if whole in entries else None
