"""OLMo 2: norms after each block only, and queries and keys normalised over all heads at once."""

import dataclasses
import functools

from inferjax.config import Attention, LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.olmo_gguf import OLMO2_GGUF
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params

_NORMS = {"attention_out": "post_attention_layernorm", "ffn_out": "post_feedforward_layernorm"}


def _config(reader: ConfigReader) -> ModelConfig:
    layer = read_olmo_layer(reader, read_attention(reader))
    layers = [layer] * read_num_layers(reader)
    return read_model(reader, "olmo2", layers, layer.norm, eos=50_279)


def read_olmo_layer(reader: ConfigReader, attention: Attention) -> LayerSpec:
    """Return a layer of OLMo 2 or 3; `attention` tells its heads, its rope and its window."""
    biased = reader.flag("attention_bias", False)
    norm = read_norm(reader, default=1e-5)
    attention = dataclasses.replace(
        attention, qkv_bias=biased, out_bias=biased, qk_norm=norm, qk_norm_span="all_heads"
    )
    return LayerSpec(
        attention=attention, ffn=read_mlp(reader), norm=norm, norm_in=False, norm_out=True
    )


def weights(config: ModelConfig) -> Params:
    """Return where every weight of OLMo 2 and 3 comes from."""
    return decoder(config, functools.partial(decoder_layer, norms=_NORMS))


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    config=_config,
    weights=weights,
    gguf=OLMO2_GGUF,
)
