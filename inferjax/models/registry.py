"""The table of model families: a new one is a file beside this one and a line here."""

import importlib
from collections.abc import Mapping, Sequence

from inferjax.errors import UnsupportedModel
from inferjax.models.family import Family
from inferjax.models.gguf_config import own_keys
from inferjax.models.gguf_format import GgufFormat

_FILES = (
    "cohere",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)
FAMILIES: tuple[Family, ...] = tuple(
    importlib.import_module(f"inferjax.models.{name}").FAMILY for name in _FILES
)


def family_for(model_type: object, architectures: object = None) -> Family:
    """Return the family of a Hugging Face config.

    Raises: UnsupportedModel listing the known families.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    shown = f"model_type {str(model_type)[:60]!r}"
    if isinstance(architectures, list) and architectures:
        shown += f" ({', '.join(str(name)[:60] for name in architectures[:4])})"
    raise _unknown(shown, [name for family in FAMILIES for name in family.model_types])


def family_named(name: str) -> Family:
    """Return the family that `ModelConfig.family` names.

    Raises: UnsupportedModel listing the known families.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise _unknown(f"family {name[:60]!r}", [family.name for family in FAMILIES])


def gguf_family_for(metadata: Mapping[str, object]) -> tuple[Family, GgufFormat]:
    """Return the family of a GGUF file, and how it is stored.

    Raises: UnsupportedModel listing the known architectures.
    """
    known = [(family, family.gguf) for family in FAMILIES if family.gguf is not None]
    architecture = metadata.get("general.architecture")
    if isinstance(architecture, str):
        own = own_keys(metadata, architecture)
        for family, gguf in known:
            if gguf.architecture == architecture and gguf.when(own):
                return family, gguf
    shown = f"GGUF architecture {str(architecture)[:60]!r}"
    raise _unknown(shown, sorted({gguf.architecture for _, gguf in known}))


def _unknown(shown: str, known: Sequence[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"{shown} is not implemented",
        why=f"the known ones are {', '.join(sorted(known))}",
        fix="use a checkpoint of one of these",
    )
