"""Finds a model and opens it: its tensors, its config and its family, whatever the format."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from inferjax.checkpoint.catalog import default_cache_dir, fetch, load_catalog
from inferjax.checkpoint.fused_experts import find_fused, renamed
from inferjax.checkpoint.gguf import open_gguf
from inferjax.checkpoint.gguf_parts import gguf_in_folder
from inferjax.checkpoint.hub import Hub, fetch_from_hub
from inferjax.checkpoint.hub_files import parse_hub_id
from inferjax.checkpoint.json_file import read_object
from inferjax.checkpoint.orbax import is_saved, read_saved_config
from inferjax.checkpoint.pooling import MODULES_NAME, read_pooling
from inferjax.checkpoint.quantized_file import unquantized
from inferjax.checkpoint.replace import previous_of
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.checkpoint.tensor_file import TensorFile
from inferjax.config import ModelConfig
from inferjax.errors import CheckpointError
from inferjax.models.family import Family, model_sources, read_config
from inferjax.models.gguf_config import hf_config, read_pooling_type
from inferjax.models.gguf_format import GgufFormat, Part, Stored
from inferjax.models.gguf_tensors import find_tensor
from inferjax.models.quantization_config import KEY as QUANTIZATION_KEY
from inferjax.models.registry import family_for, gguf_family_for
from inferjax.models.sources import Tensor
from inferjax.tokenizer import Tokenizer, tokenizer_from_directory, tokenizer_from_gguf

CONFIG_NAME = "config.json"
# Written by AutoGPTQ and by AutoAWQ before config.json said the same, without naming the method.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open model.

    `raw` is its config in Hugging Face's form, also for GGUF; `gguf` is None for safetensors.
    """

    path: Path
    file: TensorFile
    family: Family
    raw: Mapping[str, Any]
    gguf: GgufFormat | None = None

    def config(self, max_context: int | None = None) -> ModelConfig:
        """Return the model's facts."""
        config = read_config(self.family, self.raw, max_context)
        if self.gguf is not None:
            pooling = read_pooling_type(self.file.metadata, self.gguf.architecture)
            return dataclasses.replace(config, pooling=pooling)
        pooling = read_pooling(self.path if self.path.is_dir() else self.path.parent, config)
        if pooling is None:
            return config
        # Embedding models keep the name of the causal model they were, without its head.
        head = config.head if self._has_head(config) else "none"
        return dataclasses.replace(config, pooling=pooling, head=head)

    def _has_head(self, config: ModelConfig) -> bool:
        head: Any = model_sources(self.family, config).head
        tensors = () if head is None else head.tensors
        parts = [part for tensor in tensors for part in self.find(tensor, config).parts]
        return all(part.name in self.file.entries for part in parts)

    def find(self, tensor: Tensor, config: ModelConfig) -> Stored:
        """Return where one of Hugging Face's tensors is stored, or where it should be."""
        entries = self.file.entries
        if self.gguf is not None:
            return find_tensor(self.gguf, tensor, config, entries)
        name, prefix = tensor.name, self.family.base_prefix
        if not any(entry.startswith(prefix) for entry in entries):
            name = name.removeprefix(prefix)
        fused = find_fused(Tensor(name, tensor.shape), config, entries)
        return Stored((fused or Part(renamed(name, entries), tensor.shape, tensor.shape),))

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return a tensor by its name in the file."""
        return self.file.read(name)


def find_model(
    source: str | Path, cache_dir: Path | None, *, progress: bool, hub: Hub | None = None
) -> Path:
    """Return the path of a model: an existing path, a catalog name or a hub id, fetched if need be.

    Raises: CheckpointError that lists what was tried, or says why it could not be fetched.
    """
    path = local_path(source)
    if path is not None:
        return path
    catalog = load_catalog()
    if isinstance(source, str) and source in catalog:
        return fetch(source, cache_dir or default_cache_dir(), progress=progress)
    hub_id = parse_hub_id(source)
    if hub_id is not None:
        return fetch_from_hub(hub_id, hub=hub, progress=progress)
    raise CheckpointError(
        f"no model {str(source)[:200]!r} was found",
        why=f"there is no such file or folder; the catalog holds {', '.join(sorted(catalog))}",
        fix="give a folder of config.json and .safetensors files, a .gguf file, a catalog name or "
        "a hub id: owner/name, owner/name@revision, owner/name:Q4_K_M or owner/name/file.gguf",
    )


def local_path(source: str | Path) -> Path | None:
    """Return the path that `source` is, None if nothing is there.

    Raises: CheckpointError for what cannot be a path.
    """
    try:
        path = Path(source).expanduser()
        # Between its two names a checkpoint that is being replaced bears the second.
        places = (path, previous_of(path)) if path.name else (path,)
        return next((place for place in places if place.exists()), None)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{str(source)[:200]!r} is no path", why=str(error)[:80]) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder, a .safetensors file beside its config.json, or a .gguf file.

    Raises: CheckpointError for files that are missing, damaged or pickles; UnsupportedModel for an
      unknown family.
    """
    gguf = path if path.suffix == ".gguf" else lone_gguf(path)
    if gguf is not None:
        return open_gguf_checkpoint(gguf)
    file = open_safetensors(path)
    raw = read_config_file(path if path.is_dir() else path.parent)
    family = family_for(raw.get("model_type"), raw.get("architectures"))
    return Checkpoint(path=path, file=unquantized(file, raw, family), family=family, raw=raw)


def read_model_config(path: Path) -> ModelConfig:
    """Return a model's facts without opening its weights where its config stands apart."""
    if is_saved(path):
        return read_saved_config(path)[0]
    pooled = (path / MODULES_NAME).is_file()
    if pooled or not path.is_dir() or lone_gguf(path) is not None:
        return open_checkpoint(path).config()
    raw = read_config_file(path)
    return read_config(family_for(raw.get("model_type"), raw.get("architectures")), raw)


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read config.json, and the older file beside it that says how the weights are quantized.

    Raises: CheckpointError if it is missing, oversized, too deep, or no JSON object.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(
            f"there is no {CONFIG_NAME} in {folder}",
            why="weights alone do not say which model they are",
            fix="put the checkpoint's config.json beside its weights",
        )
    raw = read_object(path)
    if raw.get(QUANTIZATION_KEY) is None:
        raw |= _quantization_beside(folder)
    return raw


def _quantization_beside(folder: Path) -> dict[str, Any]:
    """Return how the weights are quantized as older tools say it, in a file of their own."""
    for name, method in QUANTIZATION_FILES.items():
        path = folder / name
        if path.is_file():
            return {QUANTIZATION_KEY: {"quant_method": method} | read_object(path)}
    return {}


def read_tokenizer(path: Path, gguf: Mapping[str, object] | None = None) -> Tokenizer | None:
    """Return the tokenizer of a GGUF file's metadata, or beside the weights; None if there is none.

    Raises: TokenizerError, TemplateError.
    """
    if gguf is not None:
        return tokenizer_from_gguf(gguf)
    folder = path if path.is_dir() else path.parent
    return tokenizer_from_directory(folder) if (folder / "tokenizer.json").exists() else None


def lone_gguf(path: Path) -> Path | None:
    """Return the GGUF model, or its first part, of a folder that has no safetensors."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    return gguf_in_folder(path)


def open_gguf_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, which describes its model itself.

    Raises: CheckpointError, UnsupportedModel, UnsupportedConfig.
    """
    file = open_gguf(path)
    family, gguf = gguf_family_for(file.metadata)
    raw = hf_config(gguf, family.model_types[0], file.metadata, file.entries.keys(), file.read)
    return Checkpoint(path=path, file=file, family=family, raw=raw, gguf=gguf)
