"""The least metadata that each architecture of GGUF allows, and readers of it without a file."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from inferjax.config import ModelConfig
from inferjax.models.family import read_config
from inferjax.models.gguf_config import hf_config
from inferjax.models.registry import gguf_family_for

SIZES = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 112,
    "attention.head_count": 4,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
LAYER = {"attention.layer_norm_epsilon": 1e-5}
EXPERTS = {"expert_count": 8, "expert_used_count": 2}
LATENT = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
    "expert_feed_forward_length": 48,
    "expert_shared_count": 1,
}
LEAST: Mapping[str, Mapping[str, Any]] = {
    "command-r": LAYER,
    "deepseek2": {**RMS, **EXPERTS, **LATENT},
    "gemma": RMS,
    "gemma2": RMS,
    "gemma3": RMS,
    "glm4": RMS,
    "gpt-oss": {**RMS, **EXPERTS, "expert_feed_forward_length": 48, "attention.sliding_window": 8},
    "gpt2": LAYER,
    "gptneox": LAYER,
    "granite": {**RMS, "logit_scale": 8.0},
    "llama": RMS,
    "olmo2": RMS,
    "phi3": RMS,
    "qwen2": RMS,
    "qwen2moe": {**RMS, **EXPERTS},
    "qwen3": RMS,
    "qwen3moe": {**RMS, **EXPERTS},
    "smollm3": RMS,
    "stablelm": LAYER,
    "starcoder2": LAYER,
}


def metadata(architecture: str, **changed: Any) -> dict[str, object]:
    """Return the least metadata of an architecture, with keys changed; None leaves one out."""
    keys = {**SIZES, **LEAST[architecture], **changed}
    own = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    tokens = {"tokenizer.ggml.tokens": [str(i) for i in range(320)]}
    return {"general.architecture": architecture, **tokens, **own}


def raw_config(
    architecture: str,
    names: Collection[str] = (),
    tensors: Mapping[str, list[float]] | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """Return the Hugging Face config of such metadata, beside tensors that only have names."""
    tensors = tensors or {}
    stored = {**dict.fromkeys(names), **tensors}
    found = metadata(architecture, **changed)
    family, gguf = gguf_family_for(found)
    name = family.model_types[0]
    return hf_config(gguf, name, found, stored, lambda tensor: np.float32(tensors[tensor]))


def config(architecture: str, *args: Any, **changed: Any) -> ModelConfig:
    """Return the facts that follow."""
    family, _ = gguf_family_for(metadata(architecture, **changed))
    return read_config(family, raw_config(architecture, *args, **changed))
