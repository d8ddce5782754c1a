"""Where `inferjax plan` gets a model's facts from; no weight is read.

A path, a name of the planner's table, a name of the catalog or a hub id will do.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferjax.checkpoint.hub import Hub
from inferjax.checkpoint.hub_files import HubId
from inferjax.cli.setup import cache_folder
from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedModel
from inferjax.planner.leaves import Leaf, loaded_leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model's facts; `stored` returns its weights as a file holds them, None for a config alone.

    `stored` takes the dtype of the weights that are arrays.
    """

    name: str
    config: ModelConfig
    stored: Callable[[str], tuple[Leaf, ...]] | None = None


def find_facts(source: str, *, hub: Hub | None = None) -> Found:
    """Return what is known of a model by its name or path.

    Raises: UnsupportedModel for a name that is nowhere; CheckpointError, UnsupportedConfig.
    """
    from inferjax.checkpoint import catalog
    from inferjax.checkpoint.hub_files import parse_hub_id
    from inferjax.checkpoint.opened import find_model, local_path
    from inferjax.planner.public_models import is_public, public_config

    path = local_path(source)
    if path is not None:
        return _of_path(source, path)
    known = catalog.load_catalog()
    if source in known and catalog.is_cached(source, cache_folder()):
        return _of_path(source, cache_folder() / known[source].file)
    hub_id = parse_hub_id(source)
    if is_public(source) or (hub_id is None and source not in known):
        return Found(name=source, config=public_config(source))
    if hub_id is not None:
        return Found(name=source, config=_of_hub(hub_id, hub))
    return _of_path(source, find_model(source, cache_folder(), progress=False))


def _of_path(name: str, path: Path) -> Found:
    from inferjax.checkpoint.json_file import read_object
    from inferjax.checkpoint.opened import read_model_config
    from inferjax.models.family import read_config
    from inferjax.models.quantization_config import KEY
    from inferjax.models.registry import family_for

    if path.suffix == ".json":
        raw = read_object(path)
        family = family_for(raw.get("model_type"), raw.get("architectures"))
        return Found(name=name, config=read_config(family, raw))
    config = read_model_config(path)
    packed = path.suffix == ".gguf" or _raw_config(path).get(KEY) is not None
    stored = (lambda dtype: _stored_leaves(path, dtype)) if packed else None
    return Found(name=name, config=config, stored=stored)


def _raw_config(path: Path) -> dict[str, Any]:
    from inferjax.checkpoint.opened import CONFIG_NAME, lone_gguf, read_config_file

    folder = path if path.is_dir() else path.parent
    if lone_gguf(folder) is not None or not (folder / CONFIG_NAME).is_file():
        return {}
    return read_config_file(folder)


def _stored_leaves(path: Path, dtype: str) -> tuple[Leaf, ...]:
    """Return the weights as `load` keeps them: packed where the file holds codes."""
    import jax

    from inferjax.checkpoint.matching import compare_tensors
    from inferjax.checkpoint.opened import open_checkpoint
    from inferjax.models.quantized import abstract_leaf

    checkpoint = open_checkpoint(path)
    try:
        config = dataclasses.replace(checkpoint.config(), dtype=dtype)
        leaves, treedef, _ = compare_tensors(checkpoint, config, "native")
    finally:
        checkpoint.file.close()
    arrays = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if leaf.packing is None
        else abstract_leaf(leaf.packing.spec, leaf.packing.form)
        for leaf in leaves
    ]
    return loaded_leaves(config, treedef.unflatten(arrays))


def _of_hub(hub_id: HubId, hub: Hub | None) -> ModelConfig:
    """Return the facts of a repository from its small files.

    Raises: UnsupportedModel for one without config.json.
    """
    from inferjax.checkpoint.hub import fetch_small_files
    from inferjax.checkpoint.opened import CONFIG_NAME, read_config_file
    from inferjax.models.family import read_config
    from inferjax.models.registry import family_for

    folder, _ = fetch_small_files(hub_id, hub=hub)
    if not (folder / CONFIG_NAME).is_file():
        raise UnsupportedModel(
            f"{hub_id.repo} has no {CONFIG_NAME}",
            why="a plan of a hub id is made from its config alone",
            fix="name the repository it was made from, or fetch a .gguf file and give its path",
        )
    raw = read_config_file(folder)
    return read_config(family_for(raw.get("model_type"), raw.get("architectures")), raw)
