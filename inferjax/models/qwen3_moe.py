"""Qwen 3 with experts: Qwen 3's attention, and experts in all layers or some."""

import functools

from inferjax.config import ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.qwen_config import (
    ROUTER_KEYS,
    read_decoder,
    read_qwen_experts,
    read_sparse_ffns,
)
from inferjax.models.qwen_gguf import QWEN3_MOE_GGUF
from inferjax.models.settings import (
    expect_one_kind,
    read_attention,
    read_norm,
    read_switched_window,
)
from inferjax.models.sources import decoder, decoder_layer, dense_or_experts
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    ffns = read_sparse_ffns(reader, lambda dense: read_qwen_experts(reader, dense))
    window = read_switched_window(reader)
    expect_one_kind(reader, len(ffns), window)
    biased = reader.flag("attention_bias", False)
    attention = read_attention(
        reader, kv_heads=4, qkv_bias=biased, out_bias=biased, qk_norm=read_norm(reader)
    )
    return read_decoder(reader, "qwen3_moe", attention, [window] * len(ffns), ffns)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, ffn=dense_or_experts))


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    config=_config,
    weights=_weights,
    # Released configs have the last key of Qwen 3's; here a window is on all layers or none.
    ignored_keys=ROUTER_KEYS | {"max_window_layers"},
    gguf=QWEN3_MOE_GGUF,
)
