"""Gemma, Gemma 2 and Gemma 3 in GGUF files: norms stored with their one added."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_config import read_layer_types
from inferjax.models.gguf_format import (
    LAYER_PARTS,
    QK_NORMS,
    SANDWICH_PARTS,
    Facts,
    GgufFormat,
    Setting,
    minus_one,
)

_SANDWICH = minus_one("input_layernorm", *SANDWICH_PARTS)
# The format does not state the query scale. Every release scales by its head's width but the 27B
# ones, which scale by model width / heads; these numbers of layers are theirs alone.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _query_scale(config: Mapping[str, Any], architecture: str) -> float:
    if config["num_hidden_layers"] == _LAYERS_OF_27B[architecture]:
        return config["hidden_size"] / config["num_attention_heads"]
    return config["head_dim"]


def _gemma2(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    facts.reader.expect("rope.freq_base_swa", config["rope_theta"])
    return {
        "query_pre_attn_scalar": _query_scale(config, "gemma2"),
        "layer_types": read_layer_types(facts.reader, config["num_hidden_layers"], 2),
    }


def _gemma3(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    reader, num_layers = facts.reader, config["num_hidden_layers"]
    window = reader.integer("attention.sliding_window", 0, low=0, high=2**30)
    kinds = read_layer_types(reader, num_layers, 6 if window else 1)
    if not window and "sliding_attention" in kinds:
        reader.refuse("attention.sliding_window", None, "its pattern says that layers slide")
    return {
        "query_pre_attn_scalar": _query_scale(config, "gemma3"),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": window or None,
        "layer_types": kinds,
    }


GEMMA_GGUF = GgufFormat(
    architecture="gemma", undo=minus_one("input_layernorm", "post_attention_layernorm")
)
GEMMA2_GGUF = GgufFormat(
    architecture="gemma2",
    # What files leave out is what every release has.
    settings=(
        Setting("attn_logit_softcapping", "attn_logit_softcapping", default=50.0),
        Setting("final_logit_softcapping", "final_logit_softcapping", default=30.0),
        Setting("attention.sliding_window", "sliding_window", "count", 4096),
    ),
    derive=_gemma2,
    parts={**LAYER_PARTS, **SANDWICH_PARTS},
    undo=_SANDWICH,
)
GEMMA3_GGUF = GgufFormat(
    architecture="gemma3",
    settings=(Setting("final_logit_softcapping", "final_logit_softcapping", default=None),),
    derive=_gemma3,
    parts={**LAYER_PARTS, **SANDWICH_PARTS, **QK_NORMS},
    undo={**_SANDWICH, **minus_one(*QK_NORMS)},
)
