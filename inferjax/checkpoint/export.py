"""Writes a model as the safetensors folder that Hugging Face tools load."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm
from jaxtyping import Array, Shaped
from safetensors.numpy import save_file

from inferjax.checkpoint.pooling import write_pooling
from inferjax.config import ModelConfig
from inferjax.models.family import Family
from inferjax.models.registry import family_named
from inferjax.models.tensors import iterate_tensors
from inferjax.params import Params

SHARD_BYTES = 5 * 10**9

_REPLACED_KEYS = {"torch_dtype", "dtype", "quantization_config"}
_SUFFIX = {"labels": "ForSequenceClassification", "none": "Model"}


def write_safetensors(
    folder: Path,
    config: ModelConfig,
    raw: Mapping[str, Any],
    params: Params,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write config.json, the weights in as many files as `shard_bytes` asks for, and the pooling.

    One file's tensors are in memory at a time. Weights keep their dtype and get the names and the
    layout of Hugging Face.
    """
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    bar = tqdm.tqdm(
        total=total, desc="writing weights", unit="B", unit_scale=True, disable=not progress
    )
    places: dict[str, int] = {}
    sizes = []
    with bar:
        for index, shard in enumerate(_shards(config, params, shard_bytes)):
            save_file(shard, folder / _part(index), metadata={"format": "pt"})
            places |= dict.fromkeys(shard, index)
            sizes.append(sum(values.nbytes for values in shard.values()))
            bar.update(sizes[-1])
    _name_parts(folder, places, sum(sizes), len(sizes))
    text = json.dumps(_exported_config(config, raw, params), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    write_pooling(folder, config)


def _shards(
    config: ModelConfig, params: Params, shard_bytes: int
) -> Iterator[dict[str, Shaped[np.ndarray, "..."]]]:
    shard: dict[str, Shaped[np.ndarray, "..."]] = {}
    size = 0
    for name, values in iterate_tensors(config, params):
        if shard and size + values.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = _contiguous(values)
        size += values.nbytes
    yield shard


def _contiguous(values: Array) -> Shaped[np.ndarray, "..."]:
    return np.ascontiguousarray(jax.device_get(values)).reshape(values.shape)


def _part(index: int) -> str:
    return f"part-{index}.safetensors"


def _name_parts(folder: Path, places: Mapping[str, int], num_bytes: int, count: int) -> None:
    """Give the files their usual names, which tell how many there are, and write the index."""
    if count == 1:
        os.replace(folder / _part(0), folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for index, name in enumerate(names):
        os.replace(folder / _part(index), folder / name)
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {tensor: names[part] for tensor, part in sorted(places.items())},
    }
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _exported_config(config: ModelConfig, raw: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """Return the config that describes the weights as they are written."""
    kept = {key: value for key, value in raw.items() if key not in _REPLACED_KEYS}
    family = family_named(config.family)
    return {
        **kept,
        "model_type": raw.get("model_type", family.model_types[0]),
        "architectures": [_architecture(config, family)],
        "dtype": params.embed.dtype.name,
    }


def _architecture(config: ModelConfig, family: Family) -> str:
    if config.head == "vocabulary":
        return family.architectures[0]
    stem = family.architectures[-1].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return stem + _SUFFIX[config.head]
