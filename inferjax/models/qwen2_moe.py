"""Qwen 2 with experts, and one expert for all tokens that a gate of its own weighs."""

import functools

from inferjax.config import MLP, ModelConfig, MoE
from inferjax.models.family import Family
from inferjax.models.hf import MAX_LAYERS, ConfigReader
from inferjax.models.qwen_config import (
    ROUTER_KEYS,
    read_decoder,
    read_qwen_experts,
    read_sparse_ffns,
)
from inferjax.models.qwen_gguf import QWEN2_MOE_GGUF
from inferjax.models.settings import read_attention, read_layer_windows, read_switched_window
from inferjax.models.sources import decoder, decoder_layer, dense_or_experts, experts
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    ffns = read_sparse_ffns(reader, functools.partial(_read_experts, reader))
    last = reader.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    # Without layer_types, unlike in Qwen 2, every other one of the first layers slides.
    windows = read_layer_windows(
        reader, len(ffns), read_switched_window(reader), lambda i: i % 2 == 0 and i < last
    )
    attention = read_attention(reader, kv_heads=16, qkv_bias=reader.flag("qkv_bias", True))
    return read_decoder(reader, "qwen2_moe", attention, windows, ffns)


def _read_experts(reader: ConfigReader, dense: MLP) -> MoE:
    shared = MLP(
        ffn_dim=reader.integer("shared_expert_intermediate_size"), activation=dense.activation
    )
    return read_qwen_experts(reader, dense, shared=shared, shared_gate=True)


def _weights(config: ModelConfig) -> Params:
    moe = functools.partial(experts, shared="shared_expert")
    ffn = functools.partial(dense_or_experts, moe=moe)
    return decoder(config, functools.partial(decoder_layer, ffn=ffn))


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    config=_config,
    weights=_weights,
    ignored_keys=ROUTER_KEYS,
    gguf=QWEN2_MOE_GGUF,
)
