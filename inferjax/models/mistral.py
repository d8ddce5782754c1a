"""Mistral: Llama's layers, with one sliding window or none on all of them."""

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.llama_gguf import MISTRAL_GGUF
from inferjax.models.settings import (
    expect_one_kind,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_window,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    num_layers, window = read_num_layers(reader), read_window(reader, 4096)
    expect_one_kind(reader, num_layers, window)
    norm = read_norm(reader)
    layer = LayerSpec(
        attention=read_attention(reader, kv_heads=8, window=window),
        ffn=read_mlp(reader),
        norm=norm,
    )
    return read_model(reader, "mistral", [layer] * num_layers, norm, bos=1, eos=2)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=MISTRAL_GGUF,
)
