"""Reads GGUF metadata strictly, as a Hugging Face config: a key is used, or an error naming it."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from inferjax.config import Pooling
from inferjax.errors import UnsupportedConfig
from inferjax.models.gguf_format import Facts, GgufFormat, ReadTensor, Setting
from inferjax.models.gguf_rope import read_rope_keys
from inferjax.models.hf import MAX_CONTEXT, MAX_LAYERS, ConfigReader

# general.file_type of the formats that are not quantized; the rest is dequantized to 8 good bits.
_FILE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
# What the format calls the ways to pool; zero is none, and the ways beyond these have heads.
_POOLING: Mapping[int, Pooling] = {
    1: Pooling(kind="mean", normalize=True),
    2: Pooling(kind="first", normalize=True),
    3: Pooling(kind="last", normalize=True),
}
MAX_LIST = 65_536
# Keys that may list a number for every layer.
_PER_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
)


def hf_config(
    gguf: GgufFormat,
    model_type: str,
    metadata: Mapping[str, object],
    names: Collection[str],
    read: ReadTensor,
) -> dict[str, Any]:
    """Return the Hugging Face config that says what a file's metadata and its setting tensors say.

    Raises: UnsupportedConfig for a key that is missing, unknown, out of range, or contradicted.
    """
    reader = metadata_reader(metadata, gguf.architecture)
    facts = Facts(reader, names, read)
    config = {**_read_common(facts, metadata), **_read_settings(reader, (gguf.eps, *gguf.settings))}
    dim = config["hidden_size"]
    config |= read_heads(facts, dim) if gguf.heads is None else gguf.heads(facts, dim)
    if gguf.rope:
        config |= read_rope_keys(facts, config, gguf.rotated)
    config |= {name: facts.has(part) for name, part in gguf.present.items()}
    config |= gguf.constants
    for key, value in gguf.expected.items():
        reader.expect(key, value)
    config |= gguf.derive(facts, config)
    reader.finish()
    renamed = {gguf.renamed.get(name, name): value for name, value in config.items()}
    return {"model_type": model_type, **renamed}


def metadata_reader(metadata: Mapping[str, object], architecture: str) -> ConfigReader:
    """Return a strict reader of the keys that describe the architecture, without their prefix."""
    own = own_keys(metadata, architecture)
    own |= {key: _one_of_equals(own[key]) for key in _PER_LAYER if key in own}
    return ConfigReader(
        own,
        where=f"GGUF metadata {architecture}.*",
        # The order of the file's tensors before conversion, and what `read_pooling_type` reads.
        ignored={"tensor_data_layout", "pooling_type"},
    )


def read_pooling_type(metadata: Mapping[str, object], architecture: str) -> Pooling | None:
    """Return how an embedding model pools, None for another model.

    The format does not say whether vectors are normalised; its own tools do so by default.

    Raises: UnsupportedConfig for a way that is not implemented.
    """
    kind = metadata_reader(metadata, architecture).integer("pooling_type", 0, low=0, high=3)
    return _POOLING.get(kind)


def own_keys(metadata: Mapping[str, object], architecture: str) -> dict[str, object]:
    """Return the keys that describe the architecture, without their prefix."""
    prefix = f"{architecture}."
    return {k.removeprefix(prefix): _plain(v) for k, v in metadata.items() if k.startswith(prefix)}


def _plain(value: object) -> object:
    """Return a value as JSON would hold it: comparing an array gives no truth, but an array.

    What is longer than any list of layers, or nested, stays text that no reader accepts.
    """
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= MAX_LIST else f"{value.size} numbers"
    if isinstance(value, list) and not all(isinstance(item, str | int | float) for item in value):
        return f"{len(value)} lists"
    return value


def _one_of_equals(value: object) -> object:
    """Return the number that a list repeats for every layer; other values as they are."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _read_settings(reader: ConfigReader, settings: Collection[Setting]) -> dict[str, Any]:
    found = {setting: _read_setting(reader, setting) for setting in settings}
    given = {setting: value for setting, value in found.items() if value is not None}
    return {s.name: v or None if s.kind == "window" else v for s, v in given.items()}


def _read_setting(reader: ConfigReader, setting: Setting) -> Any:
    key, default = setting.key, setting.default
    if setting.kind == "flag":
        return default if reader.value(key) is None else reader.flag(key, default=False)
    if setting.kind == "number":
        return reader.number(key, default)
    return reader.integer(key, default, low=0, high=MAX_CONTEXT)


def _read_common(facts: Facts, metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return what all architectures have in common."""
    reader = facts.reader
    reader.expect("attention.causal", True)
    return {
        "hidden_size": reader.integer("embedding_length"),
        "num_hidden_layers": reader.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": reader.integer("attention.head_count", high=65_536),
        "intermediate_size": reader.integer("feed_forward_length"),
        "max_position_embeddings": reader.integer("context_length", high=MAX_CONTEXT),
        "vocab_size": reader.integer("vocab_size", _num_tokens(metadata)),
        "tie_word_embeddings": "output.weight" not in facts.names,
        "dtype": _FILE_DTYPES.get(_file_type(metadata), "bfloat16"),
        **_token_ids(metadata),
    }


def read_heads(facts: Facts, dim: int) -> dict[str, Any]:
    """Return the heads of grouped attention, whose keys and values are equally wide."""
    reader = facts.reader
    heads = reader.integer("attention.head_count", high=65_536)
    head_dim = reader.integer("attention.key_length", max(dim // heads, 1))
    reader.expect("attention.value_length", head_dim)
    if reader.value("attention.value_length") is None and head_dim * heads != dim:
        reader.refuse("attention.value_length", None, f"keys are {head_dim} wide, of {dim}")
    return {
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads, high=65_536),
        "head_dim": head_dim,
    }


def read_layer_types(reader: ConfigReader, num_layers: int, period: int) -> list[str]:
    """Return the kind of every layer: by a list, or by a period whose last layer is global."""
    key = "attention.sliding_window_pattern"
    value = reader.value(key)
    if isinstance(value, list):
        slides = [bool(slides) for slides in value]
        if len(slides) != num_layers:
            reader.refuse(key, value, f"it must tell of {num_layers} layers")
    else:
        period = reader.integer(key, period, high=MAX_LAYERS)
        slides = [bool((i + 1) % period) for i in range(num_layers)]
    return ["sliding_attention" if yes else "full_attention" for yes in slides]


def _num_tokens(metadata: Mapping[str, object]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedConfig(
            "GGUF metadata has neither a vocab_size nor tokenizer.ggml.tokens",
            why="the size of the vocabulary is needed",
        )
    return len(tokens)


def _file_type(metadata: Mapping[str, object]) -> int:
    kind = metadata.get("general.file_type")
    return kind if isinstance(kind, int) else -1


def _token_ids(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return the special ids; the end of a turn ends a reply as the end of text does."""
    kinds = ("bos", "eos", "eot", "eom", "padding")
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds}
    for kind, value in ids.items():
        if value is not None and type(value) is not int:
            raise UnsupportedConfig(
                f"GGUF metadata: tokenizer.ggml.{kind}_token_id is {str(value)[:80]}",
                why="it must be the id of a token",
            )
    ends = [ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] is not None]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": list(dict.fromkeys(ends)),
        "pad_token_id": ids["padding"],
    }
