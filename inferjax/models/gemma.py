"""Gemma: scaled embeddings, norms whose weights are stored minus one, wide heads, a gated gelu."""

import math
from collections.abc import Mapping

from inferjax.config import MLP, Activation, LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.gemma_gguf import GEMMA_GGUF
from inferjax.models.hf import ACTIVATIONS, ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params

# The first releases said "gelu" and were trained with its tanh approximation.
_ACTIVATIONS: Mapping[str, Activation] = {**ACTIVATIONS, "gelu": "gelu_tanh"}


def _config(reader: ConfigReader) -> ModelConfig:
    reader.expect("use_bidirectional_attention", False)
    biased = reader.flag("attention_bias", False)
    norm = read_norm(reader, unit_offset=True)
    mlp = MLP(
        ffn_dim=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    expect_activation(reader, "hidden_activation", mlp.activation)
    layer = LayerSpec(
        attention=read_attention(
            reader, kv_heads=16, head_dim=256, qkv_bias=biased, out_bias=biased
        ),
        ffn=mlp,
        norm=norm,
    )
    return read_model(
        reader,
        "gemma",
        [layer] * read_num_layers(reader),
        norm,
        tied=True,
        bos=2,
        eos=1,
        embed_scale=math.sqrt(reader.integer("hidden_size")),
    )


def expect_activation(reader: ConfigReader, key: str, activation: Activation) -> None:
    """Refuse a second key for the activation that names another one."""
    reader.expect(key, *(name for name, known in _ACTIVATIONS.items() if known == activation))


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    architectures=("GemmaForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=GEMMA_GGUF,
)
