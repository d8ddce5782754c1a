"""Writes AWQ and GPTQ checkpoints of tiny random models, packed the slow and obvious way.

Nothing is shared with what reads them: a word is a Python integer whose fields are set one by one.
What every weight stands for, `(code - zero) * scale` in float32, is kept beside.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from inferjax.models.family import model_sources, read_config
from inferjax.models.registry import family_for
from inferjax.models.sources import Source

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 320,
}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a checkpoint is quantized; `group` -1 is one group. `keep` names layers that are not."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    version: int = 1
    whole_words: bool = False
    scale_dtype: str = "float16"
    keep: tuple[str, ...] = ()
    config: dict = dataclasses.field(default_factory=dict)


def pack_word(fields, bits):
    """Join small numbers to one, the first in the lowest bits."""
    return sum(int(field) << (bits * at) for at, field in enumerate(fields))


def to_words(number, count):
    return np.frombuffer(number.to_bytes(4 * count, "little"), np.int32)


def pack_rows(values, bits):
    """Pack each row of numbers into words: fields may cross from one word to the next."""
    count = values.shape[1] * bits // 32
    return np.stack([to_words(pack_word(row, bits), count) for row in values])


def pack_awq(values):
    """Pack each row, eight numbers a word, in AWQ's order."""
    rows = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
    return np.stack(
        [np.concatenate([to_words(pack_word(word, 4), 1) for word in row]) for row in rows]
    )


def pack_zeros(zeros, recipe):
    """Pack GPTQ's zeros, less one in the first version of the format."""
    if recipe.version == 2:
        return pack_rows(zeros, recipe.bits)
    if not recipe.whole_words:
        return pack_rows((zeros - 1) % (1 << recipe.bits), recipe.bits)
    ones = pack_word([1] * (32 // recipe.bits), recipe.bits)
    words = pack_rows(zeros, recipe.bits).astype(np.int64)
    return ((words - ones) % (1 << 32)).astype(np.uint32).view(np.int32)


def quantize_layer(name, weight, recipe, rng):
    """Return a layer's tensors, and the weight [out, in] that they stand for."""
    num_out, num_in = weight.shape
    group = num_in if recipe.group == -1 else recipe.group
    groups = np.arange(num_in) // group
    if recipe.act_order:
        groups = rng.permutation(groups)
    count, top = groups.max() + 1, (1 << recipe.bits) - 1
    scales = np.zeros((count, num_out), recipe.scale_dtype)
    zeros = np.full((count, num_out), (top + 1) // 2)
    for g in range(count):
        part = weight[:, groups == g]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if recipe.symmetric:
            scales[g] = 2 * np.maximum(high, -low) / top
        else:
            scales[g] = (high - low) / top
            zeros[g] = np.clip(np.round(-low / scales[g].astype(np.float32)), 0, top)
    steps = scales.astype(np.float32)[groups]
    codes = np.clip(np.round(weight.T / steps) + zeros[groups], 0, top).astype(np.int64)
    tensors = {"scales": scales}
    if recipe.method == "awq":
        tensors |= {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros)}
    else:
        tensors |= {"qweight": pack_rows(codes.T, recipe.bits).T, "g_idx": groups.astype(np.int32)}
        tensors["qzeros"] = pack_zeros(zeros, recipe)
    known = np.ascontiguousarray(((codes - zeros[groups]).astype(np.float32) * steps).T)
    return {f"{name}.{part}": np.ascontiguousarray(v) for part, v in tensors.items()}, known


def quantization_config(recipe):
    if recipe.method == "awq":
        found = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
        return found | {"group_size": recipe.group} | recipe.config
    found = {"quant_method": "gptq", "bits": recipe.bits, "group_size": recipe.group}
    found |= {"sym": recipe.symmetric, "desc_act": recipe.act_order, "damp_percent": 0.01}
    found["checkpoint_format"] = "gptq" if recipe.version == 1 else "gptq_v2"
    return found | recipe.config


def model_tensors(raw, rng):
    """Return random values for every tensor of a config's model."""
    family = family_for(raw["model_type"], raw["architectures"])
    sources = jax.tree.leaves(
        model_sources(family, read_config(family, raw)), is_leaf=lambda n: isinstance(n, Source)
    )
    shapes = {tensor.name: tensor.shape for source in sources for tensor in source.tensors}
    return {
        name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        + np.float32(name.endswith("norm.weight"))
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, raw, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return folder


def is_quantized(name, recipe):
    layer = ".layers." in name and name.endswith("proj.weight")
    return layer and not any(part in name for part in recipe.keep)


def write_pair(folder: Path, raw, recipe, seed=0):
    """Write a quantized checkpoint, and the float32 one that has the same weights; return both."""
    draw = np.random.default_rng(seed)
    plain, packed = {}, {}
    for name, values in model_tensors(raw, draw).items():
        plain[name] = packed[name] = values.astype(np.float16)
        if is_quantized(name, recipe):
            layer = name.removesuffix(".weight")
            # Layers that read the same vector are calibrated on it: they order it alike.
            block = layer.rpartition(".")[0] + (
                "" if layer.endswith(("o_proj", "down_proj")) else "#"
            )
            rng = np.random.default_rng([seed, *block.encode()])
            del packed[name]
            tensors, plain[name] = quantize_layer(layer, values, recipe, rng)
            packed |= tensors
    config = raw | {"quantization_config": quantization_config(recipe)}
    return write_folder(folder / "packed", config, packed), write_folder(
        folder / "plain", raw, plain
    )


def swap_layer(folder: Path, other: Path, layer):
    """Give a checkpoint the tensors that another has for a layer."""
    mine, theirs = (load_file(f / "model.safetensors") for f in (folder, other))
    kept = {name: values for name, values in mine.items() if not name.startswith(layer)}
    kept |= {name: values for name, values in theirs.items() if name.startswith(layer)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
