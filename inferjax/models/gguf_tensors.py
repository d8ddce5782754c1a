"""Finds Hugging Face's tensors in GGUF files, by the table of their family."""

import math
import re
from collections.abc import Collection

from inferjax.config import Attention, LayerSpec, ModelConfig, MoE
from inferjax.models.gguf_format import GgufFormat, Part, Stored, Undo
from inferjax.models.sources import Tensor

_NUMBER = re.compile(r"\.(\d{1,6})(?=\.|$)")


def find_tensor(
    gguf: GgufFormat, tensor: Tensor, config: ModelConfig, names: Collection[str]
) -> Stored:
    """Return where a tensor is among the stored ones; where it should be, if it is missing."""
    part, _, leaf = tensor.name.rpartition(".")
    if part in gguf.top:
        whole = f"{gguf.top[part]}.{leaf}"
        return _undone(Part(whole, tensor.shape, tensor.shape), gguf.undo.get(part), config)
    index, _, inner = tensor.name.removeprefix(gguf.layers).partition(".")
    if not tensor.name.startswith(gguf.layers) or not index.isdecimal():
        return _whole(tensor, tensor.name)
    block, spec = f"blk.{index}.", config.layers[int(index)]
    if inner in gguf.special:
        return gguf.special[inner](block, tensor.shape, spec, names)
    part = inner.rpartition(".")[0]
    numbers = _NUMBER.findall(part)
    part = _NUMBER.sub(".*", part)
    if part not in gguf.parts:
        return _whole(tensor, tensor.name)
    stem = gguf.parts[part]
    if numbers:
        return Stored((_numbered(block, stem, leaf, int(numbers[0]), tensor.shape, spec, names),))
    stored = _fused_qkv(block, stem, leaf, tensor.shape, spec, names)
    return _undone(stored, gguf.undo.get(part), config)


def _whole(tensor: Tensor, name: str) -> Stored:
    return Stored((Part(name, tensor.shape, tensor.shape),))


def _undone(stored: Part, undo: Undo | None, config: ModelConfig) -> Stored:
    if undo is None:
        return Stored((stored,))
    if undo.transposed:
        stored = Part(stored.name, stored.whole[::-1], stored.shape[::-1])
    return Stored((stored,), lambda values: undo.values(values, config))


def _numbered(
    block: str,
    stem: str,
    leaf: str,
    index: int,
    shape: tuple[int, ...],
    spec: LayerSpec,
    names: Collection[str],
) -> Part:
    """Find one of several equal parts: in a stack, in a stack of two kinds, or on its own."""
    stacked, fused = f"{block}{stem}.{leaf}", f"{block}ffn_gate_up_exps.{leaf}"
    alone = f"{block}{stem.removesuffix('_exps')}.{index}.{leaf}"
    size, count = math.prod(shape), _count(stem, spec)
    if stacked not in names and alone in names:
        return Part(alone, shape, shape)
    if stacked not in names and fused in names and stem in ("ffn_gate_exps", "ffn_up_exps"):
        run = int(stem == "ffn_up_exps")
        return Part(fused, (count, 2 * shape[0], *shape[1:]), shape, (2 * index + run) * size)
    return Part(stacked, (count, *shape), shape, index * size)


def _count(stem: str, spec: LayerSpec) -> int:
    """Return how many parts are stacked: experts, or heads with norms of their own."""
    if isinstance(spec.ffn, MoE) and stem.endswith("_exps"):
        return spec.ffn.router.num_experts
    if isinstance(spec.attention, Attention) and stem == "attn_k_norm":
        return spec.attention.num_kv_heads
    return spec.attention.num_q_heads


def _fused_qkv(
    block: str,
    stem: str,
    leaf: str,
    shape: tuple[int, ...],
    spec: LayerSpec,
    names: Collection[str],
) -> Part:
    """Find a projection; a file may hold those of queries, keys and values as one tensor."""
    alone, fused = f"{block}{stem}.{leaf}", f"{block}attn_qkv.{leaf}"
    attention, order = spec.attention, ("attn_q", "attn_k", "attn_v")
    apart = alone in names or fused not in names or stem not in order
    if apart or not isinstance(attention, Attention):
        return Part(alone, shape, shape)
    rows = [
        heads * attention.head_dim
        for heads in (attention.num_q_heads, attention.num_kv_heads, attention.num_kv_heads)
    ]
    begin = sum(rows[: order.index(stem)]) * math.prod(shape[1:])
    return Part(fused, (sum(rows), *shape[1:]), shape, begin)
