"""Finds experts in checkpoints that keep all of a layer's in one tensor.

Published checkpoints store every expert's gate, up and down apart. Models that transformers 5 saves
without going back to that layout (`save_original_format=False`) have `gate_up_proj` [E, 2 F, D],
gates before ups, and `down_proj` [E, D, F], and name Mixtral's block and router like everyone's.
"""

import math
import re
from collections.abc import Mapping

from inferjax.checkpoint.tensor_file import TensorEntry
from inferjax.config import ModelConfig, MoE
from inferjax.models.gguf_format import Part
from inferjax.models.sources import Tensor

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


def find_fused(
    tensor: Tensor, config: ModelConfig, entries: Mapping[str, TensorEntry]
) -> Part | None:
    """Return where an expert's tensor is within a fused one; None unless there is one."""
    found = _EXPERT.fullmatch(tensor.name)
    if tensor.name in entries or found is None or found["part"] not in _PARTS:
        return None
    fused, run, num_runs = _PARTS[found["part"]]
    whole = renamed(f"{found['block']}.experts.{fused}", entries)
    if whole not in entries:
        return None
    count = max(spec.ffn.router.num_experts for spec in config.layers if isinstance(spec.ffn, MoE))
    rows, *rest = tensor.shape
    begin = (int(found["index"]) * num_runs + run) * math.prod(tensor.shape)
    return Part(whole, (count, num_runs * rows, *rest), tensor.shape, begin)
