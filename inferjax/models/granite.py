"""Granite: Llama with a multiplier on the embedding, on attention, on residuals and on logits."""

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.granite_gguf import GRANITE_GGUF
from inferjax.models.hf import ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    biased = reader.flag("attention_bias", False)
    norm = read_norm(reader)
    layer = LayerSpec(
        attention=read_attention(
            reader,
            scale=reader.number("attention_multiplier", 1.0),
            qkv_bias=biased,
            out_bias=biased,
        ),
        ffn=read_mlp(reader, bias=reader.flag("mlp_bias", False)),
        norm=norm,
        residual_scale=reader.number("residual_multiplier", 1.0),
    )
    return read_model(
        reader,
        "granite",
        [layer] * read_num_layers(reader),
        norm,
        bos=1,
        eos=2,
        embed_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / reader.positive("logits_scaling", 1.0),
    )


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=GRANITE_GGUF,
)
