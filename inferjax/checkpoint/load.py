"""Loads a model: finds it, checks it against its config, and reads it tensor by tensor."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm
from jax.sharding import Mesh

from inferjax.checkpoint.matching import match_tensors
from inferjax.checkpoint.memory import return_free_memory
from inferjax.checkpoint.opened import (
    Checkpoint,
    find_model,
    open_checkpoint,
    read_model_config,
    read_tokenizer,
)
from inferjax.checkpoint.orbax import is_saved, read_orbax, read_saved_config
from inferjax.checkpoint.planning import Mode, quantize_mode
from inferjax.checkpoint.reading import read_leaves
from inferjax.checkpoint.tensor_file import readable
from inferjax.config import ModelConfig
from inferjax.errors import PackedWeightsWarning, UnsupportedConfig
from inferjax.models.hf import DTYPES
from inferjax.models.placed import placements
from inferjax.params import Params
from inferjax.quant.leaf import is_packed
from inferjax.rules import DEFAULT_RULES, Rules
from inferjax.tokenizer import Tokenizer
from pallas_kernels import native


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
    quantize: str | None = None,
    progress: bool = False,
    cache_dir: Path | None = None,
    max_context: int | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Model:
    """Load a folder, a .safetensors or .gguf file, what `save` wrote, or a model of the catalog.

    `quantize` names how the weights of products are packed while they are read: a scheme of
    `SCHEMES` ("int8", "int4", ...; "bfloat16" packs without rounding what has 16 bits), "native"
    for the codes that the checkpoint holds, bit for bit, or "none" for arrays. None is "native",
    and "none" where a dtype is given. Memory peaks little above what stays.

    `dtype` is that of the weights that are arrays: by default the checkpoint's, and float32 on a
    CPU. There XLA computes about thirty times slower with bfloat16 arrays: they are what
    `dtype="bfloat16"` gives, as asked, and `quantize="bfloat16"` is half the memory and faster.
    Packed weights are computed with in float32. `max_context` shortens the declared context, or
    extends it where the rope scaling is "dynamic".

    With a `mesh` every weight is cut by `rules` as it is read: a device never has more than its
    part, and the host one weight at a time. A weight that an axis does not divide is whole on every
    device of it: two key/value heads on eight devices, or in a packed weight parts that would not
    end with whole blocks.

    Raises: CheckpointError, UnsupportedModel, UnsupportedConfig, CatalogError, TokenizerError;
      ShardingError for a mesh with an axis that the rules do not name, or that divides no weight.
    Warns: PackedWeightsWarning where the native kernels of packed weights are missing.
    """
    mode = quantize_mode(dtype, quantize)
    path = find_model(source, cache_dir, progress=progress)
    with readable(path):
        if is_saved(path):
            model = _load_saved(path, dtype, mode, progress, max_context, mesh, rules)
        else:
            model = _load_stored(path, dtype, mode, progress, max_context, mesh, rules)
    warn_of_slow_products(model.params)
    return model


def arrays_dtype(source: str | Path, *, cache_dir: Path | None = None) -> str:
    """Return the dtype that holds what a checkpoint has beside codes, without loss.

    A GGUF file of blocks does not say; its norms and biases are float32.
    """
    path = find_model(source, cache_dir, progress=False)
    with readable(path):
        if is_saved(path):
            return read_saved_config(path)[0].dtype
        checkpoint = open_checkpoint(path)
        try:
            blocks = any(entry.codes for entry in checkpoint.file.entries.values())
            return "float32" if checkpoint.gguf and blocks else checkpoint.config().dtype
        finally:
            checkpoint.file.close()


def _load_stored(
    path: Path,
    dtype: Any,
    mode: Mode,
    progress: bool,
    max_context: int | None,
    mesh: Mesh | None,
    rules: Rules,
) -> Model:
    """Load safetensors or GGUF."""
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config(max_context)
        config = dataclasses.replace(config, dtype=_weights_dtype(dtype, config))
        tokenizer = read_tokenizer(checkpoint.path, checkpoint.gguf and checkpoint.file.metadata)
        params = _read_params(checkpoint, config, mode, progress, mesh, rules)
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


def _load_saved(
    path: Path,
    dtype: Any,
    mode: Mode,
    progress: bool,
    max_context: int | None,
    mesh: Mesh | None,
    rules: Rules,
) -> Model:
    """Load what `save` wrote by Orbax."""
    config, raw = read_saved_config(path, max_context)
    config = dataclasses.replace(config, dtype=_weights_dtype(dtype, config))
    params = read_orbax(path, config, mode, progress=progress, mesh=mesh, rules=rules)
    return Model(
        config=config,
        params=params,
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


def warn_of_slow_products(params: Params) -> None:
    """Warn once of packed weights on a CPU without the kernels that make them fast."""
    packed = any(is_packed(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))
    if not packed or jax.default_backend() != "cpu":
        return
    if reason := native.unavailable_reason():
        warnings.warn(
            f"packed weights are slow here, each product unpacks its weight first: {reason}",
            PackedWeightsWarning,
            stacklevel=3,
        )


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


def _read_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mode: Mode,
    progress: bool,
    mesh: Mesh | None,
    rules: Rules,
) -> Params:
    leaves, treedef = match_tensors(checkpoint, config, mode)
    places = None
    if mesh is not None:
        abstract = jax.tree.unflatten(treedef, [leaf.abstract for leaf in leaves])
        places = treedef.flatten_up_to(placements(abstract, config, mesh, rules=rules))
    # What was freed so far, the tokenizer's building above all, would add to the peak.
    return_free_memory()
    bar = tqdm.tqdm(
        total=sum(leaf.num_bytes for leaf in leaves),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar:
        arrays = read_leaves(
            checkpoint.file,
            leaves,
            str(checkpoint.path),
            lambda leaf: bar.update(leaf.num_bytes),
            places,
        )
    return jax.tree.unflatten(treedef, arrays)
