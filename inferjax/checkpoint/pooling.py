"""How a sentence-transformers folder says that hidden states become one vector for a text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferjax.checkpoint.json_file import read_list, read_object
from inferjax.config import ModelConfig, Pooling
from inferjax.errors import CheckpointError, UnsupportedModel
from inferjax.models.hf import ConfigReader

MODULES_NAME = "modules.json"

_MAX_BYTES = 2**16
_SUPPORTED = {"lasttoken": "last", "mean": "mean", "cls": "first"}
# The older of two styles has a flag for each mode; none of them set means the mean.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_pooling(folder: Path, config: ModelConfig) -> Pooling | None:
    """Return the pooling that modules.json describes; None for a folder without that file.

    Raises: UnsupportedModel for modules or modes that are not implemented, by their names;
      CheckpointError, UnsupportedConfig for files that are damaged or contradict the model.
    """
    if not (folder / MODULES_NAME).is_file():
        return None
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{folder / MODULES_NAME}: the modules are {', '.join(kinds)[:200]}",
            why="implemented are Transformer, Pooling and perhaps Normalize, in this order",
            fix="remove the file to load the bare model, and run other modules on what embed "
            "returns",
        )
    if modules[0][1]:
        raise CheckpointError(
            f"{folder / MODULES_NAME}: the model is in the folder {modules[0][1][:80]!r}",
            fix="put config.json and the weights beside modules.json",
        )
    normalize = len(modules) == 3
    if normalize:
        _check_normalize(folder / modules[2][1])
    kind = _read_kind(folder / modules[1][1], config.embed_dim or config.model_dim)
    return Pooling(kind=kind, normalize=normalize)


def write_pooling(folder: Path, config: ModelConfig) -> None:
    """Write what `read_pooling` reads; nothing for a model without pooling."""
    pooling = config.pooling
    if pooling is None:
        return
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    mode = next(mode for mode, kind in _SUPPORTED.items() if kind == pooling.kind)
    width = config.embed_dim or config.model_dim
    flags = {key: named == mode for key, named in _FLAGS.items()}
    _write(folder / MODULES_NAME, modules)
    for entry in modules[1:]:
        (folder / entry["path"]).mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return each module's kind, the last part of its class's name, and its folder."""
    path = folder / MODULES_NAME
    entries = read_list(path, _MAX_BYTES)
    modules = []
    for entry in entries:
        fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
        kind, place = fields.get("type"), fields.get("path")
        plain = isinstance(place, str) and place != ".." and place == Path(place).name
        if not isinstance(kind, str) or not plain:
            raise CheckpointError(
                f"{path}: {str(entry)[:80]} is no module",
                why="a module has a type, and the name of a folder beside the file",
            )
        modules.append((kind.rpartition(".")[2], place))
    return modules


def _read_kind(folder: Path, width: int) -> Any:
    """Return the kind of `Pooling` that a module's config asks for."""
    path = folder / "config.json"
    reader = ConfigReader(read_object(path, _MAX_BYTES), where=str(path))
    reader.expect("word_embedding_dimension", width)
    reader.expect("embedding_dimension", width)
    flags = [mode for key, mode in _FLAGS.items() if reader.flag(key, False)]
    named = reader.value("pooling_mode")
    modes = (named if isinstance(named, list) else [named]) if named is not None else flags
    if len(modes) > 1 or any(mode not in _SUPPORTED for mode in map(str, modes)):
        raise UnsupportedModel(
            f"{path}: the pooling is {' and '.join(map(str, modes))[:200]}",
            why=f"implemented are {', '.join(_SUPPORTED)}, one at a time",
            fix="remove modules.json to load the bare model, and pool its activations",
        )
    kind = _SUPPORTED[str(modes[0])] if modes else "mean"
    if not reader.flag("include_prompt", True) and kind != "last":
        reader.refuse("include_prompt", False, "a prompt's tokens are pooled like the others")
    reader.finish()
    return kind


def _check_normalize(folder: Path) -> None:
    """Check a module that only newer folders have a config of."""
    path = folder / "config.json"
    if not path.is_file():
        return
    reader = ConfigReader(read_object(path, _MAX_BYTES), where=str(path))
    reader.expect("module_input_name", "sentence_embedding")
    reader.expect("module_output_name", "sentence_embedding")
    reader.finish()
