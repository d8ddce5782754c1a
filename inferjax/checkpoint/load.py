"""Loads a model: finds it, checks it against its config, and reads it tensor by tensor."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm
from jaxtyping import Array, Shaped

from inferjax.checkpoint.matching import Leaf, match_tensors
from inferjax.checkpoint.opened import Checkpoint, find_model, open_checkpoint, read_model_config
from inferjax.checkpoint.orbax import is_saved, read_orbax, read_saved_config
from inferjax.config import ModelConfig
from inferjax.errors import CheckpointError, UnsupportedConfig
from inferjax.models.hf import DTYPES
from inferjax.params import Params
from inferjax.tokenizer import Tokenizer, tokenizer_from_directory, tokenizer_from_gguf

_ALIGNMENT = 64  # from which on XLA's CPU client takes an array over instead of copying it


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
    if is_saved(path):
        return _load_saved(path, dtype, progress)
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config(max_context)
        config = dataclasses.replace(config, dtype=_weights_dtype(dtype, config))
        params = _read_params(checkpoint, config, progress)
        tokenizer = _read_tokenizer(checkpoint)
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
    has_tokenizer = (path / "tokenizer.json").exists()
    return Model(
        config=config,
        params=read_orbax(path, config, progress=progress),
        tokenizer=tokenizer_from_directory(path) if has_tokenizer else None,
        family=config.family,
        path=path,
        raw=raw,
    )


def config_only(source: str | Path, *, cache_dir: Path | None = None) -> ModelConfig:
    """Return a model's facts without its weights (a catalog model is fetched first)."""
    return read_model_config(find_model(source, cache_dir, progress=False))


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


def _read_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if checkpoint.gguf is not None:
        return tokenizer_from_gguf(checkpoint.file.metadata)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return tokenizer_from_directory(folder) if (folder / "tokenizer.json").exists() else None


def _read_params(checkpoint: Checkpoint, config: ModelConfig, progress: bool) -> Params:
    """Read all leaves, a few at a time in threads; at most those are in memory twice."""
    leaves, treedef = match_tensors(checkpoint, config)
    bar = tqdm.tqdm(
        total=sum(leaf.num_bytes for leaf in leaves),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )

    def read(leaf: Leaf) -> Array:
        array = _read_leaf(checkpoint, leaf)
        bar.update(leaf.num_bytes)
        return array

    with bar:
        return jax.tree.unflatten(treedef, _map_threads(read, leaves))


def _map_threads(read: Any, leaves: Sequence[Leaf]) -> list[Array]:
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    try:
        return list(pool.map(read, leaves))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read_leaf(checkpoint: Checkpoint, leaf: Leaf) -> Array:
    parts = []
    for name, transform in leaf.reads:
        values = checkpoint.read(name)
        _check_finite(values, f"tensor {name!r} of {checkpoint.path}")
        parts.append(values if transform is None else transform(values))
    return _place(leaf.build(*parts), leaf)


def _check_finite(values: Shaped[np.ndarray, "..."], what: str) -> None:
    """Raise if a value is NaN or infinite; the count is only taken then."""
    if values.size == 0 or _extremes_are_finite(values):
        return
    wide = values.astype(np.float32, copy=False)
    count = int(np.size(wide) - np.isfinite(wide).sum())
    raise CheckpointError(
        f"{what} has {count} of {values.size} values that are NaN or infinite",
        why="the weights were damaged, or saved from a run that diverged",
        fix="fetch the checkpoint again, or use an earlier one",
        count=count,
    )


def _extremes_are_finite(values: Shaped[np.ndarray, "..."]) -> bool:
    """Look at the exponents' bits of half-width floats, and at the extremes of others."""
    if values.dtype.itemsize == 2:
        top = 0x7C00 if values.dtype == np.float16 else 0x7F80
        return int((values.view(np.uint16) & 0x7FFF).max()) < top
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _place(values: Shaped[np.ndarray, "..."], leaf: Leaf) -> Array:
    """Copy once, into memory that XLA's CPU client takes over, and hand it to the device."""
    dtype = np.dtype(leaf.dtype)
    buffer = np.empty(leaf.num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    out = buffer[start : start + leaf.num_bytes].view(dtype).reshape(leaf.shape)
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if dtype == np.float16 and values.dtype != np.float16:
        _check_finite(out, f"{leaf.reads[0][0]!r} rounded to float16")
    return jax.device_put(out)
