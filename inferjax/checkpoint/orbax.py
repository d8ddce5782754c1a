"""A model saved by Orbax: its weights as a pytree, beside what says which model they are.

The folder holds `inferjax.json` (the config in Hugging Face's form, which leaves are packed and
how, and the size and SHA-256 of every other file), the tokenizer's files, and `params/`, an
ordinary Orbax checkpoint that other programs can restore. Sizes and checksums are compared before
Orbax sees a byte: its formats are parsed by native code that damaged files must not reach.
"""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp
import tqdm
from jax.sharding import Mesh

from inferjax.checkpoint.json_file import read_object
from inferjax.checkpoint.planning import Mode
from inferjax.checkpoint.restoring import restore
from inferjax.checkpoint.saved_leaves import abstract_leaves, dtype_of_arrays, packed_forms
from inferjax.config import ModelConfig, Pooling
from inferjax.errors import CheckpointError, InferjaxError
from inferjax.models.family import read_config
from inferjax.models.hf import DTYPES
from inferjax.models.registry import family_named
from inferjax.params import Params
from inferjax.rules import DEFAULT_RULES, Rules

RECORD_NAME = "inferjax.json"
PARAMS_NAME = "params"
FORMAT = 1
_CHUNK_BYTES = 2**20


def is_saved(path: Path) -> bool:
    """Tell whether a folder is one that `write_orbax` makes."""
    return (path / RECORD_NAME).is_file()


def write_orbax(folder: Path, config: ModelConfig, raw: Mapping[str, Any], params: Params) -> None:
    """Write the weights and, last, the record of all files in `folder`.

    Each process of jax writes its parts of the weights, and the first the record.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / PARAMS_NAME).absolute(), params)
        checkpointer.wait_until_finished()
    if jax.process_index() > 0:
        return
    content = {
        "format": FORMAT,
        "family": config.family,
        "dtype": dtype_of_arrays(params, config),
        "max_context": config.max_context,
        "head": config.head,
        "pooling": config.pooling and dataclasses.asdict(config.pooling),
        "config": dict(raw),
        "packed": packed_forms(params),
        "files": {name: _fingerprint(folder / name) for name in _files(folder)},
    }
    record = {"sha256": _digest(content), **content}
    text = json.dumps(record, indent=1, sort_keys=True)
    (folder / RECORD_NAME).write_text(text, encoding="utf-8")


def read_saved_config(
    folder: Path, max_context: int | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model's facts, with the dtype of the stored weights, and its raw config.

    `max_context` overrides the context that the model was saved with.

    Raises: CheckpointError for a record that is damaged, UnsupportedConfig as for any config.
    """
    record = _read_record(folder)
    try:
        family = family_named(record["family"])
        served = record["max_context"] if max_context is None else max_context
        config = read_config(family, record["config"], served)
        pooling = record["pooling"] and Pooling(**record["pooling"])
        dtype, head = record["dtype"], record["head"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{error!r}"[:200]) from error
    if dtype not in DTYPES or head not in (config.head, "none"):
        raise _damaged(folder, f"{RECORD_NAME} says dtype {dtype!r:.40}, head {head!r:.40}")
    config = dataclasses.replace(config, dtype=dtype, head=head, pooling=pooling or None)
    return config, record["config"]


def read_saved_shapes(folder: Path, config: ModelConfig) -> Params:
    """Return the weights as `jax.ShapeDtypeStruct`, packed as they were saved.

    What is an array has `config.dtype`.

    Raises: CheckpointError for a record that is damaged.
    """
    try:
        return abstract_leaves(config, _read_record(folder).get("packed", {}))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _damaged(folder, str(error)[:500]) from error


def read_orbax(
    folder: Path,
    config: ModelConfig,
    mode: Mode,
    *,
    progress: bool = False,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Params:
    """Restore the weights, as `mode` asks for, after checking every file.

    They go to one device, or are cut by `rules` on a mesh: whatever they were saved from. What is
    an array is rounded to `config.dtype`.

    Raises: CheckpointError naming a file that is missing or differs from what was saved;
      ShardingError for a mesh that does not suit the model.
    """
    record = _read_record(folder)
    _check_files(folder, record["files"], progress)
    try:
        saved = abstract_leaves(config, record.get("packed", {}))
        path = (folder / PARAMS_NAME).absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            _check_shapes(folder, checkpointer.metadata(path), saved)
        return restore(path, saved, config, mode, mesh, rules)
    except InferjaxError:
        raise
    except Exception as error:
        raise _damaged(folder, str(error)[:500]) from error


def _read_record(folder: Path) -> dict[str, Any]:
    record = read_object(folder / RECORD_NAME)
    digest = record.pop("sha256", None)
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / RECORD_NAME} has format {str(record.get('format'))[:40]}",
            why=f"this version reads format {FORMAT}",
            fix="load it with the version of inferjax that saved it",
        )
    if digest != _digest(record):
        raise _damaged(folder, f"{RECORD_NAME} is not as it was saved")
    files = record.get("files")
    if not isinstance(files, dict) or not all(map(_is_fingerprint, files.values())):
        raise _damaged(folder, f"{RECORD_NAME} does not list files with their sizes and checksums")
    return record


def _is_fingerprint(known: object) -> bool:
    return (
        isinstance(known, dict)
        and type(known.get("num_bytes")) is int
        and isinstance(known.get("sha256"), str)
    )


def _check_files(folder: Path, files: Mapping[str, Any], progress: bool) -> None:
    """Compare all files with the record, a few at a time in threads."""
    found = set(_files(folder))
    if found != set(files):
        missing, extra = sorted(set(files) - found), sorted(found - set(files))
        raise _damaged(folder, f"files missing: {missing[:8]}; files that are new: {extra[:8]}")
    for name, known in files.items():
        if (folder / name).stat().st_size != known["num_bytes"]:
            raise _damaged(folder, f"{name} does not have {known['num_bytes']} bytes")
    bar = tqdm.tqdm(
        total=sum(known["num_bytes"] for known in files.values()),
        desc="checking files",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, ThreadPoolExecutor(max_workers=4) as pool:
        prints = pool.map(lambda name: (name, _fingerprint(folder / name)), files)
        for name, found_print in prints:
            bar.update(found_print["num_bytes"])
            if found_print != files[name]:
                raise _damaged(folder, f"{name} differs from what was saved")


def _check_shapes(folder: Path, metadata: Any, wanted: Params) -> None:
    """Refuse a tree that is not the config's before anything of its size is allocated."""
    packed = tuple(f"{name}/" for name in packed_forms(wanted))
    stored = _described(metadata.item_metadata.tree, packed)
    called = _described(wanted, packed)
    wrong = sorted(
        name for name in stored.keys() | called.keys() if stored.get(name) != called.get(name)
    )
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} does not hold the weights of its config ({len(wrong)} differ)",
            why=f"{name} is {stored.get(name, 'missing')}, the config calls for "
            f"{called.get(name, 'none')}",
            fix="the folder belongs to another model: save it again",
        )


def _described(tree: Any, packed: tuple[str, ...]) -> dict[str, str]:
    """Return what must agree of every array: of packed leaves, which are not converted, all."""
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return {
        name: f"{tuple(leaf.shape)}{f' {leaf.dtype}' if name.startswith(packed) else ''}"
        for name, leaf in found.items()
    }


def _files(folder: Path) -> list[str]:
    """Return all files of a folder but the record.

    Links to files are followed: their content is compared. What else a native reader could open,
    and wait for or read without end, is refused: links to folders, pipes and devices.

    Raises: CheckpointError.
    """
    found = []
    for path in _walk(folder):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise _damaged(folder, f"{path.relative_to(folder)}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            found.append(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode) or path.is_symlink():
            raise _damaged(folder, f"{path.relative_to(folder)} is neither a file nor a folder")
    return sorted(name for name in found if name != RECORD_NAME)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and in its folders."""
    for parent, folders, files in os.walk(folder, onerror=partial(_refuse_unreadable, folder)):
        yield from (Path(parent, name) for name in (*folders, *files))


def _refuse_unreadable(folder: Path, error: OSError) -> NoReturn:
    raise _damaged(folder, str(error)) from error


def _fingerprint(file: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"num_bytes": size, "sha256": digest.hexdigest()}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is damaged or incomplete", why=why, fix="copy or save the checkpoint again"
    )
