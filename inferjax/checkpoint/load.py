"""Loads a model: finds it, checks it against its config, and reads it tensor by tensor."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm

from inferjax.checkpoint.matching import match_tensors
from inferjax.checkpoint.opened import (
    Checkpoint,
    find_model,
    open_checkpoint,
    read_model_config,
    read_tokenizer,
)
from inferjax.checkpoint.orbax import is_saved, read_orbax, read_saved_config
from inferjax.checkpoint.reading import read_leaves
from inferjax.checkpoint.tensor_file import readable
from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedConfig
from inferjax.models.hf import DTYPES
from inferjax.params import Params
from inferjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded model; `tokenizer` is None for a folder without tokenizer.json.

    `raw` is the checkpoint's config in Hugging Face's form, also for other formats.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    family: str
    path: Path
    raw: Mapping[str, Any]


def load(
    source: str | Path,
    *,
    dtype: Any = None,
    progress: bool = False,
    cache_dir: Path | None = None,
    max_context: int | None = None,
) -> Model:
    """Load a folder, a .safetensors or .gguf file, what `save` wrote, or a model of the catalog.

    `dtype` is that of the weights: by default the checkpoint's, and float32 on a CPU, where XLA's
    bfloat16 matmuls are about thirty times slower. `max_context` shortens the declared context, or
    extends it where the rope scaling is "dynamic".

    Raises: CheckpointError, UnsupportedModel, UnsupportedConfig, CatalogError, TokenizerError.
    """
    path = find_model(source, cache_dir, progress=progress)
    with readable(path):
        if is_saved(path):
            return _load_saved(path, dtype, progress)
        return _load_stored(path, dtype, progress, max_context)


def _load_stored(path: Path, dtype: Any, progress: bool, max_context: int | None) -> Model:
    """Load safetensors or GGUF."""
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config(max_context)
        config = dataclasses.replace(config, dtype=_weights_dtype(dtype, config))
        params = _read_params(checkpoint, config, progress)
        tokenizer = read_tokenizer(checkpoint.path, checkpoint.gguf and checkpoint.file.metadata)
    finally:
        checkpoint.file.close()
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        family=checkpoint.family.name,
        path=path,
        raw=checkpoint.raw,
    )


def _load_saved(path: Path, dtype: Any, progress: bool) -> Model:
    """Load what `save` wrote by Orbax."""
    config, raw = read_saved_config(path)
    config = dataclasses.replace(config, dtype=_weights_dtype(dtype, config))
    return Model(
        config=config,
        params=read_orbax(path, config, progress=progress),
        tokenizer=read_tokenizer(path),
        family=config.family,
        path=path,
        raw=raw,
    )


def config_only(source: str | Path, *, cache_dir: Path | None = None) -> ModelConfig:
    """Return a model's facts without its weights (a catalog model is fetched first)."""
    path = find_model(source, cache_dir, progress=False)
    with readable(path):
        return read_model_config(path)


def _weights_dtype(wanted: Any, config: ModelConfig) -> str:
    if wanted is None:
        return "float32" if jax.default_backend() == "cpu" else config.dtype
    try:
        name = np.dtype(wanted).name
    except TypeError:
        name = str(wanted)
    if name not in DTYPES:
        raise UnsupportedConfig(f"dtype is {name!r}", why=f"weights are {', '.join(DTYPES)}")
    return name


def _read_params(checkpoint: Checkpoint, config: ModelConfig, progress: bool) -> Params:
    leaves, treedef = match_tensors(checkpoint, config)
    bar = tqdm.tqdm(
        total=sum(leaf.num_bytes for leaf in leaves),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar:
        arrays = read_leaves(
            checkpoint.file, leaves, str(checkpoint.path), lambda leaf: bar.update(leaf.num_bytes)
        )
    return jax.tree.unflatten(treedef, arrays)
