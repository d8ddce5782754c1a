"""Ids of models on the Hugging Face Hub, and which of a repository's files make up a model.

An id is `owner/name`, perhaps with `@revision`; for a repository of GGUF files `:Q4_K_M` chooses
one by its quantization, and `owner/name/file.gguf` by its name. Nothing is fetched here.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NoReturn

from inferjax.checkpoint.gguf_parts import models_among
from inferjax.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from inferjax.checkpoint.tensor_file import PICKLE_SUFFIXES
from inferjax.errors import CheckpointError

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_ID = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})"
    r"(?:/(?P<file>(?:[\w.-]+/)*[\w.-]+\.gguf))?"
    r"(?:@(?P<revision>[\w./-]{1,200}))?"
    r"(?::(?P<quant>[\w.-]{1,40}))?",
    re.ASCII,
)
# What a model is besides its weights; modules.json and its folders say how an embedding is pooled.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "quantize_config.json",
    "quant_config.json",
    INDEX_NAME,
)
_MODULE_CONFIG = re.compile(r"\d+_\w+/config\.json")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# The quantization that is taken where an id names none, as llama.cpp does.
DEFAULT_QUANT = "Q4_K_M"


@dataclasses.dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub: `revision` is a branch, tag or commit."""

    repo: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None


def parse_hub_id(source: object) -> HubId | None:
    """Return the parts of a hub id; None for what is none."""
    found = _ID.fullmatch(source) if isinstance(source, str) else None
    if found is None or ".." in found[0] or "--" in found["repo"]:
        return None
    if found["file"] and found["quant"]:
        return None
    return HubId(found["repo"], found["revision"], found["file"], found["quant"])


def needed_files(hub_id: HubId, names: Iterable[str]) -> list[str]:
    """Return which of a repository's files make up the model.

    Copies of the weights in other formats (`original/`, `consolidated.safetensors`) stay out.

    Raises: CheckpointError for a repository without weights that can be read, or with several
      models in GGUF files and none of them named.
    """
    names = sorted(names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if hub_id.file or hub_id.quant:
        return _chosen_gguf(hub_id, ggufs)
    weights = [name for name in names if name == SINGLE_NAME]
    if not weights and INDEX_NAME in names:
        weights = [name for name in names if _SHARD.fullmatch(name)]
    if weights and "config.json" in names:
        return weights + [name for name in names if is_small(name)]
    if ggufs:
        return _chosen_gguf(hub_id, ggufs)
    _refuse_without_weights(hub_id, names, has_weights=bool(weights))


def _chosen_gguf(hub_id: HubId, ggufs: list[str]) -> list[str]:
    """Return the file that is asked for, or the files that a model is split into."""
    models = models_among(ggufs)
    if not hub_id.file:  # what goes beside a model: encoders of images, calibration of quantizers
        models = [p for p in models if not re.match(r"(.*/)?(mmproj|imatrix)", p[0])]
    if hub_id.file:
        found = [parts for parts in models if hub_id.file in parts]
    elif hub_id.quant or len(models) > 1:
        found = [p for p in models if _has_quant(p[0], hub_id.quant or DEFAULT_QUANT)]
    else:
        found = models
    if len(found) == 1:
        return found[0]
    wanted = hub_id.file or hub_id.quant or DEFAULT_QUANT
    shown = ", ".join(parts[0] for parts in models[:12]) or "no .gguf file"
    raise CheckpointError(
        f"{hub_id.repo} has {len(found) or 'no'} GGUF models for {wanted!r}",
        why=f"it holds {shown}",
        fix=f"name one file, as in {hub_id.repo}/{models[0][0] if models else 'file.gguf'}",
    )


def _has_quant(name: str, quant: str) -> bool:
    """Tell whether a file's name has the quantization as a word of its own."""
    return re.search(rf"(?i)(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", name) is not None


def is_small(name: str) -> bool:
    """Tell whether a file describes a model beside its weights."""
    return name in SMALL_FILES or _MODULE_CONFIG.fullmatch(name) is not None


def _refuse_without_weights(hub_id: HubId, names: list[str], *, has_weights: bool) -> NoReturn:
    suffixes = {PurePosixPath(name).suffix for name in names}
    if has_weights:
        why, fix = "it has weights and no config.json", "use the repository that it was made from"
    elif "adapter_config.json" in names:
        why = "it is an adapter, which changes the weights of another model"
        fix = "merge it into its base model and save that"
    elif suffixes & PICKLE_SUFFIXES:
        why = "its weights are pickles, which run code when they are loaded and are never fetched"
        fix = (
            "use a revision or a repository with .safetensors files (many have a branch refs/pr/1)"
        )
    else:
        why = f"it holds {', '.join(sorted(names)[:8]) or 'nothing'}"
        fix = "use a repository with config.json and model.safetensors, or with .gguf files"
    raise CheckpointError(f"{hub_id.repo} has no model that can be loaded", why=why, fix=fix)
