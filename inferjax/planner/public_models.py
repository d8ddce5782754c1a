"""Dimensions of models that people ask for, by name: the part of their config.json that plans need.

They are read by the families' own readers. Tests compare the number of parameters that follows
with the one that each model's page states.

Source: config.json of the repository that `HUB_IDS` names, in the keys of transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedModel
from inferjax.models.family import read_config
from inferjax.models.registry import family_for

_Raw = Mapping[str, Any]


# What the numbers of a row are, in this order.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _dims(kind: str, sizes: Sequence[int], **facts: Any) -> dict[str, Any]:
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": kind, **named, "torch_dtype": "bfloat16", **facts}


def _llama(*dims: int, **facts: Any) -> dict[str, Any]:
    return _dims("llama", dims, **{"max_position_embeddings": 8192, **facts})


def _llama31(*dims: int, factor: float = 8.0, **facts: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama(
        *dims,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=scaling,
        **facts,
    )


def _qwen2(*dims: int, **facts: Any) -> dict[str, Any]:
    return _dims("qwen2", dims, max_position_embeddings=32_768, rope_theta=1e6, **facts)


def _qwen3(*dims: int, kind: str = "qwen3", **facts: Any) -> dict[str, Any]:
    context = {"max_position_embeddings": 40_960, "rope_theta": 1e6, "head_dim": 128}
    return _dims(kind, (*dims, 151_936), **context, **facts)


def _qwen3_moe(*dims: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _qwen3(*dims, kind="qwen3_moe", norm_topk_prob=True, **experts)


def _mixtral(*dims: int, context: int) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _dims("mixtral", dims, max_position_embeddings=context, rope_theta=1e6, **experts)


def _gemma2(*dims: int, head: int, scale: int) -> dict[str, Any]:
    facts = {"head_dim": head, "query_pre_attn_scalar": scale, "sliding_window": 4096}
    return _dims("gemma2", (*dims, 256_000), max_position_embeddings=8192, **facts)


def _gemma3(*dims: int, window: int, **facts: Any) -> dict[str, Any]:
    context = {"max_position_embeddings": 131_072, "head_dim": 256, "sliding_window": window}
    return _dims("gemma3_text", dims, **{**context, **facts})


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _dims(
        "gpt_oss",
        (2880, 2880, layers, 64, 8, 201_088),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=131_072,
    )


def _deepseek(*dims: int, kind: str, **facts: Any) -> dict[str, Any]:
    latent = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return _dims(kind, dims, **latent, **facts)


_TIED: dict[str, Any] = {"tie_word_embeddings": True}

_LLAMA3 = {"rope_theta": 500_000.0}
_SMOLLM2 = {"rope_theta": 100_000.0, **_TIED}
_DEEPSEEK_V3 = {
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}

# name: (hub id, config)
_MODELS: dict[str, tuple[str, _Raw]] = {
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        _llama(4096, 11_008, 32, 32, 32, 32_000, max_position_embeddings=4096),
    ),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf",
        _llama(5120, 13_824, 40, 40, 40, 32_000, max_position_embeddings=4096),
    ),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf",
        _llama(8192, 28_672, 80, 64, 8, 32_000, max_position_embeddings=4096),
    ),
    "llama-3-8b": (
        "meta-llama/Meta-Llama-3-8B",
        _llama(4096, 14_336, 32, 32, 8, 128_256, **_LLAMA3),
    ),
    "llama-3-70b": (
        "meta-llama/Meta-Llama-3-70B",
        _llama(8192, 28_672, 80, 64, 8, 128_256, **_LLAMA3),
    ),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _llama31(4096, 14_336, 32, 32, 8, 128_256)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", _llama31(8192, 28_672, 80, 64, 8, 128_256)),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        _llama31(16_384, 53_248, 126, 128, 8, 128_256),
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        _llama31(2048, 8192, 16, 32, 8, 128_256, factor=32.0, **_TIED),
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        _llama31(3072, 8192, 28, 24, 8, 128_256, factor=32.0, **_TIED),
    ),
    "llama-3.3-70b": (
        "meta-llama/Llama-3.3-70B-Instruct",
        _llama31(8192, 28_672, 80, 64, 8, 128_256),
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.3",
        _dims(
            "mistral",
            (4096, 14_336, 32, 32, 8, 32_768),
            max_position_embeddings=32_768,
            rope_theta=1e6,
            sliding_window=None,
        ),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _mixtral(4096, 14_336, 32, 32, 8, 32_000, context=32_768),
    ),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-v0.1",
        _mixtral(6144, 16_384, 56, 48, 8, 32_000, context=65_536),
    ),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", _qwen2(896, 4864, 24, 14, 2, 151_936, **_TIED)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _qwen2(3584, 18_944, 28, 28, 4, 152_064)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", _qwen2(5120, 27_648, 64, 40, 8, 152_064)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", _qwen2(8192, 29_568, 80, 64, 8, 152_064)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, 8, **_TIED)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _qwen3(2048, 6144, 28, 16, 8, **_TIED)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _qwen3(2560, 9728, 36, 32, 8, **_TIED)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _qwen3(4096, 12_288, 36, 32, 8)),
    "qwen3-14b": ("Qwen/Qwen3-14B", _qwen3(5120, 17_408, 40, 40, 8)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _qwen3(5120, 25_600, 64, 64, 8)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _qwen3_moe(2048, 6144, 48, 32, 4, expert=768)),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _qwen3_moe(4096, 12_288, 94, 64, 4, expert=1536),
    ),
    "gemma-2-9b": ("google/gemma-2-9b", _gemma2(3584, 14_336, 42, 16, 8, head=256, scale=256)),
    "gemma-2-27b": ("google/gemma-2-27b", _gemma2(4608, 36_864, 46, 32, 16, head=128, scale=144)),
    "gemma-3-270m": (
        "google/gemma-3-270m",
        _gemma3(640, 2048, 18, 4, 1, 262_144, window=512, max_position_embeddings=32_768),
    ),
    "gemma-3-1b": (
        "google/gemma-3-1b-pt",
        _gemma3(1152, 6912, 26, 4, 1, 262_144, window=512, max_position_embeddings=32_768),
    ),
    "gemma-3-4b": ("google/gemma-3-4b-pt", _gemma3(2560, 10_240, 34, 8, 4, 262_208, window=1024)),
    "gemma-3-12b": (
        "google/gemma-3-12b-pt",
        _gemma3(3840, 15_360, 48, 16, 8, 262_208, window=1024),
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-pt",
        _gemma3(5376, 21_504, 62, 32, 16, 262_208, window=1024, head_dim=128),
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _deepseek(7168, 18_432, 61, 128, 128, 129_280, kind="deepseek_v3", **_DEEPSEEK_V3),
    ),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", _llama(576, 1536, 30, 9, 3, 49_152, **_SMOLLM2)),
    "smollm2-135m-instruct": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _llama(576, 1536, 30, 9, 3, 49_152, **_SMOLLM2),
    ),
    "smollm2-360m": (
        "HuggingFaceTB/SmolLM2-360M",
        _llama(960, 2560, 32, 15, 5, 49_152, **_SMOLLM2),
    ),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B",
        _llama(2048, 8192, 24, 32, 32, 49_152, **{**_SMOLLM2, "rope_theta": 130_000.0}),
    ),
    "smollm3-3b": (
        "HuggingFaceTB/SmolLM3-3B",
        _dims(
            "smollm3",
            (2048, 11_008, 36, 16, 4, 128_256),
            max_position_embeddings=65_536,
            rope_theta=5e6,
        ),
    ),
    "phi-4": (
        "microsoft/phi-4",
        _dims(
            "phi3",
            (5120, 17_920, 40, 40, 10, 100_352),
            max_position_embeddings=16_384,
            rope_theta=250_000.0,
        ),
    ),
}
HUB_IDS: dict[str, str] = {name: hub_id for name, (hub_id, _) in _MODELS.items()}


def is_public(name: str) -> bool:
    """Tell whether a name, or a hub id, is in the table."""
    return _key(name) is not None


def public_config(name: str) -> ModelConfig:
    """Return the facts of a model by its name in the table, or by its hub id.

    Raises: UnsupportedModel listing the known ones.
    """
    key = _key(name)
    if key is None:
        raise UnsupportedModel(
            f"no model is called {name[:60]!r}",
            why=f"the planner's table holds {', '.join(_MODELS)}",
            fix="use one of these, a hub id, a config.json or folder, a .gguf file or a name of "
            "the catalog",
        )
    raw = _MODELS[key][1]
    return read_config(family_for(raw["model_type"]), raw)


def public_hub_id(name: str) -> str:
    """Return the hub id whose dimensions a name of the table has.

    Raises: KeyError for a name that is not in it.
    """
    return HUB_IDS[_key(name) or name]


def _key(name: str) -> str | None:
    lowered = name.lower()
    if lowered in _MODELS:
        return lowered
    return next((key for key, hub_id in HUB_IDS.items() if hub_id.lower() == lowered), None)
