"""Gemma 3 in GGUF files: metadata, tensor names, and norms stored with their one added."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from inferjax.config import ModelConfig
from inferjax.models.family import GgufFormat, ReadTensor, Transform
from inferjax.models.gguf_config import (
    LAYER_PARTS,
    common_config,
    gguf_name,
    metadata_reader,
    rope_scaling,
)

_PARTS = {
    **LAYER_PARTS,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# The format does not state the query scale. Every release scales by its head's width but the 27B
# one (62 layers), which scales by model width / heads.
_LAYERS_OF_27B = 62


def _config(
    metadata: Mapping[str, object], names: Collection[str], read: ReadTensor
) -> dict[str, Any]:
    del read
    reader = metadata_reader(metadata, "gemma3")
    config = common_config(reader, metadata, names)
    scale_dim = config["head_dim"]
    if config["num_hidden_layers"] == _LAYERS_OF_27B:
        scale_dim = config["hidden_size"] / config["num_attention_heads"]
    config |= {
        "model_type": "gemma3_text",
        "rope_theta": reader.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", 10_000.0),
        "rope_scaling": rope_scaling(reader),
        "sliding_window": reader.integer("attention.sliding_window", high=2**30),
        "sliding_window_pattern": reader.integer("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": reader.number("final_logit_softcapping", None),
        "query_pre_attn_scalar": scale_dim,
    }
    reader.finish()
    return config


def _tensor(name: str, config: ModelConfig) -> tuple[str, Transform | None] | None:
    del config
    stored = gguf_name(name, _PARTS)
    if stored is None:
        return None
    return stored, _without_one if name.endswith("norm.weight") else None


def _without_one(values: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Take back the one that the converter adds to every norm's weight."""
    return values.astype(np.float32) - np.float32(1.0)


GEMMA3_GGUF = GgufFormat(architecture="gemma3", config=_config, tensor=_tensor)
