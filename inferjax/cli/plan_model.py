"""Where `inferjax plan` gets a model's facts from; no weight is read.

The first of these that there is: a path, a name or hub id of the planner's table, a name of the
catalog, a hub id. What was fetched before changes nothing.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from inferjax.checkpoint.hub import Hub
from inferjax.checkpoint.hub_files import HubId
from inferjax.cli.setup import cache_folder
from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedModel
from inferjax.models.quantization_config import KEY
from inferjax.planner import Model, make_model
from inferjax.planner.leaves import Leaf, loaded_leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model's facts, and in words where they are from.

    `stored` returns the weights as `load` keeps them, given the dtype of those that are arrays;
    None where all of them are. `notes` say what the facts do not.
    """

    name: str
    config: ModelConfig
    origin: str
    stored: Callable[[str], tuple[Leaf, ...]] | None = None
    notes: tuple[str, ...] = ()


def as_loaded(found: Found, *, dtype: str, quantize: str, kv_dtype: str | None) -> Model:
    """Return the planner's view of a model whose weights `load` reads with these settings.

    `quantize` is a scheme, "native" or "none".

    Raises: UnsupportedConfig for a dtype that is not known; CheckpointError.
    """
    native = quantize == "native" and found.stored is not None
    return make_model(
        found.config,
        dtype=dtype,
        quantize=None if quantize in ("native", "none") else quantize,
        kv_dtype=kv_dtype,
        leaves=found.stored(dtype) if native and found.stored else None,
    )


def find_facts(source: str, *, hub: Hub | None = None) -> Found:
    """Return what is known of a model by its name or path.

    Raises: UnsupportedModel for a name that is nowhere; CheckpointError, UnsupportedConfig.
    """
    from inferjax.checkpoint import catalog
    from inferjax.checkpoint.hub_files import parse_hub_id
    from inferjax.checkpoint.opened import find_model, local_path
    from inferjax.planner.public_models import is_public

    path = local_path(source)
    if path is not None:
        return _of_path(source, path)
    if is_public(source):
        return _of_table(source)
    if source in catalog.load_catalog():
        return _of_path(source, find_model(source, cache_folder(), progress=False))
    hub_id = parse_hub_id(source)
    return _of_table(source) if hub_id is None else _of_hub(source, hub_id, hub)


def _of_table(name: str) -> Found:
    """Return a row of the planner's table.

    Raises: UnsupportedModel for a name that is not in it.
    """
    from inferjax.checkpoint import catalog
    from inferjax.planner.public_models import public_config, public_hub_id

    config, entry = public_config(name), catalog.load_catalog().get(name)
    notes = ()
    if entry is not None:
        path = cache_folder() / entry.file
        notes = (f"the catalog's model of this name is a file of its own: plan for it by {path}",)
    origin = f"the planner's table, after {public_hub_id(name)}"
    return Found(name=name, config=config, origin=origin, notes=notes)


def _of_path(name: str, path: Path) -> Found:
    """Return what a config.json, a folder, a file of weights or what `save` wrote says."""
    from inferjax.checkpoint.json_file import read_object
    from inferjax.checkpoint.opened import (
        CONFIG_NAME,
        lone_gguf,
        read_config_file,
        read_model_config,
    )
    from inferjax.checkpoint.orbax import RECORD_NAME, is_saved

    if path.suffix == ".json":
        return _of_config(name, read_object(path), str(path))
    config = read_model_config(path)
    folder = path if path.is_dir() else path.parent
    gguf = path if path.suffix == ".gguf" else lone_gguf(path)
    if is_saved(path):
        origin, packed = path / RECORD_NAME, True
    elif gguf is not None:
        origin, packed = gguf, True
    else:
        origin, packed = folder / CONFIG_NAME, read_config_file(folder).get(KEY) is not None
    stored = partial(_stored_leaves, path) if packed else None
    return Found(name=name, config=config, origin=str(origin), stored=stored)


def _of_config(name: str, raw: dict[str, Any], origin: str) -> Found:
    """Return what a config alone says; how integers are packed, it does not."""
    from inferjax.models.family import read_config
    from inferjax.models.registry import family_for

    config = read_config(family_for(raw.get("model_type"), raw.get("architectures")), raw)
    notes = ()
    if raw.get(KEY) is not None:
        notes = (
            "the weights are quantized, and planned as arrays: only their files tell how each is "
            "packed; give a folder that has them, or --quantize",
        )
    return Found(name=name, config=config, origin=origin, notes=notes)


def _stored_leaves(path: Path, dtype: str) -> tuple[Leaf, ...]:
    """Return the weights as `load` keeps them: codes, and leaves that were packed, stay packed."""
    import jax

    from inferjax.checkpoint.matching import compare_tensors
    from inferjax.checkpoint.opened import open_checkpoint
    from inferjax.checkpoint.orbax import is_saved, read_saved_config, read_saved_shapes
    from inferjax.models.quantized import abstract_leaf

    if is_saved(path):
        config = dataclasses.replace(read_saved_config(path)[0], dtype=dtype)
        return loaded_leaves(config, read_saved_shapes(path, config))
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


def _of_hub(name: str, hub_id: HubId, hub: Hub | None) -> Found:
    """Return the facts of a repository from its small files.

    Raises: UnsupportedModel for one without config.json.
    """
    from inferjax.checkpoint.hub import fetch_small_files
    from inferjax.checkpoint.opened import CONFIG_NAME, read_config_file

    folder, _ = fetch_small_files(hub_id, hub=hub)
    if not (folder / CONFIG_NAME).is_file():
        raise UnsupportedModel(
            f"{hub_id.repo} has no {CONFIG_NAME}",
            why="a plan of a hub id is made from its config alone",
            fix="name the repository it was made from, or fetch a .gguf file and give its path",
        )
    return _of_config(name, read_config_file(folder), f"{CONFIG_NAME} of {hub_id.repo}")
